"""Command lines, run in the process of the tests."""

import pytest

from fullshard.program.cli import main as cli


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def call(capsys):
    """Runs a command line; its exit code, standard output and standard error."""

    def run(*arguments):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(call):
    """Runs a command line that ends with a code; its standard error."""

    def run(code, *arguments):
        found, _, error = call(*arguments)
        assert found == code, error
        return error

    return run


@pytest.fixture
def done(call):
    """Runs a command line that succeeds; its standard output."""

    def run(*arguments):
        code, out, error = call(*arguments)
        assert code == 0, error
        return out

    return run

"""Plans of runs in fp8 beside what two ranks hold."""

import pytest

from support.float8_runs import PLANNED, float8_cases
from support.torchao_folder import needs_torchao

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600), needs_torchao]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return float8_cases(PLANNED, tmp_path_factory.mktemp("float8"))


@pytest.mark.parametrize("case", PLANNED)
def test_a_plan_is_what_ranks_hold(case, ranks):
    found = ranks[case]
    assert found["planned"] == pytest.approx(found["measured"], rel=0.005)
    planned, sent = found["sent"]
    assert planned == sent

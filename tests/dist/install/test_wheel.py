"""The wheel, installed into an empty environment, trains the demo outside this project's folder."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from fullshard.version import __version__

ROOT = Path(__file__).parents[3]
BUILD = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the source distribution, built from a copy of the files."""
    folder = tmp_path_factory.mktemp("built")
    skipped = ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "dist", "site", "tests", "benchmarks")
    copytree(ROOT, folder / "source", ignore=skipped)
    (folder / "dist").mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder / "dist")], cwd=folder / "source", check=True, capture_output=True
    )
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package_and_its_metadata(wheel):
    files = {path for path in (ROOT / "src" / "fullshard").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    about = f"fullshard-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{about}/METADATA"))
        entries = archive.read(f"{about}/entry_points.txt").decode()
    assert {str(path.relative_to(ROOT / "src")) for path in files} == {
        name for name in names if not name.startswith(about)
    }
    assert {"fullshard/py.typed", f"{about}/licenses/LICENSE"} <= names
    assert (metadata["Name"], metadata["Version"]) == ("fullshard", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert "fullshard = fullshard.program.cli.main:entry" in entries


def test_distributions_pass_twine(built):
    pytest.importorskip("twine", reason="needs twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    subprocess.run(command, check=True)


def test_installed_alone_it_trains_the_demo_of_the_source_distribution(built, wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    program = environment / "bin" / "python"
    install = [str(program), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    # Dependencies of the environment at hand; after the installation, which would take its fullshard for installed.
    (site,) = environment.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(others))
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    examples = tmp_path / f"fullshard-{__version__}" / "examples"
    settings = ["data.max_train_samples=256", "data.max_eval_samples=16", "training.num_train_epochs=1"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [str(environment / "bin" / "fullshard"), "train", str(examples / "banking77_tiny.yaml"), *settings],
        cwd=tmp_path,
        env=env
        | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "runs" / "demo" / "model.safetensors").exists()
    where = subprocess.run(
        [str(program), "-c", "import fullshard; print(fullshard.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert Path(where.stdout.strip()).is_relative_to(site)

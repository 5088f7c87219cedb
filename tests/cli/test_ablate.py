"""The command ``driftgen ablate``: lists and wrong input."""

import pytest


def test_lists_studies_and_cases(here):
    done = here("ablate")
    assert done.returncode == 0
    assert "antisymmetry    Anti-symmetry of the drifting field" in done.stdout
    assert here("ablate", "--list").stdout == done.stdout
    cases = here("ablate", "temperatures", "--list").stdout.splitlines()
    assert cases[0].split() == ["0.02", "0.02"]
    assert len(cases) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["antisymetry"], "study='antisymetry' is not known: did you mean 'antisymmetry'?"),
        (["{tmp}/missing.yaml"], "missing.yaml cannot be read: No such file"),
        (["{tmp}/bad.yaml"], "bad.yaml: varies: Field required"),
        (["style", "--base", "mnist"], "base='mnist' is not known: choose from cifar10, digits"),
        (["style", "--seeds", "0;1"], "seeds='0;1': write whole numbers"),
        (["style", "--cases", "witout"], "case='witout' is not known: did you mean 'without'?"),
        (["style", "--base", "cifar10"], "data.path is not set: the base cifar10 needs images"),
        (["style", "--base", "cifar10", "--set", "data.path=none.npz"], "data.path=none.npz: no such file"),
        (["style", "--set", "optim.stesp=3"], "optim.stesp is not known: did you mean optim.steps?"),
        (["style", "--processes", "0"], "processes=0 must be at least 1"),
        (["style", "--samples", "3"], "samples=3 must be at least 20"),
        (["style", "--evaluator", "nowhere"], "nowhere does not exist"),
        (["style", "--device", "tpu9"], "device=tpu9"),
        (["style", "--out", "{tmp}/bad.yaml"], "cannot write to"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, words, message, here, monkeypatch):
    (tmp_path / "bad.yaml").write_text("title: x\nbases: {digits: {}}\ncases: []\n")
    monkeypatch.chdir(tmp_path)
    done = here("ablate", *(word.format(tmp=tmp_path) for word in words))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.rglob("metrics.jsonl"))

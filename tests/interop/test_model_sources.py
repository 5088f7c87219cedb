"""Names of models that are found on this machine or not at all."""

from pathlib import Path

import pytest

import driftgen as dg
from driftgen.interop import hub
from driftgen.interop.model_sources import find_model
from driftgen.interop.packaged import find_packaged
from tests.support.helpers import fails


def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda name: asked.append(name) or Path("from-hub"))
    monkeypatch.chdir(tmp_path)
    fails(lambda: find_model("runs/photos"), "^runs/photos not found: runs holds no run or model; make one ")
    fails(lambda: find_model(f"{tmp_path}/photos"), "/photos not found: .* holds no run or model")
    digits = dg.load_model(find_packaged("digits"))
    for name in ("photos", "mae-photos", "digits-1", "digits-2", "two"):
        dg.save_model(digits, tmp_path / "runs" / name)
    fails(lambda: find_model("runs/photo"), "^runs/photo not found: runs has photos, mae-photos and 3 more\n")
    fails(
        lambda: find_model("runs/x"),
        "^runs/x not found: runs has digits-1, digits-2, mae-photos and 2 more\n",
    )
    assert asked == []
    assert find_model("owner/photos") == Path("from-hub")
    with pytest.raises(dg.InputError, match="no run or model"):
        dg.load_model("./owner/photos")
    assert asked == ["owner/photos"]


def test_a_home_folder_is_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    dg.save_model(dg.load_model(find_packaged("digits")), tmp_path / "photos")
    assert find_model("~/photos") == tmp_path / "photos"
    fails(lambda: find_model("~/photo"), "^~/photo not found: .* has photos\n")


def test_an_owner_on_the_hub_whose_name_a_folder_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    fails(
        lambda: find_model("owner/photos"),
        "owner holds no run .*; on the Hugging Face Hub: hf://owner/photos",
    )
    for name in ("runs/photos", "./photos", f"{tmp_path}/photos"):
        with pytest.raises(dg.InputError) as caught:
            find_model(name)
        assert "hf://" not in str(caught.value)

"""Time per chunk of several methods with one network."""

import json

import pytest

from driftgen.errors import InputError
from driftgen.training.policy_latency import measure_methods


@pytest.mark.slow  # imports diffusers
def test_one_row_for_each_method_of_the_same_network(tmp_path, capsys):
    small = tmp_path / "small.yaml"
    small.write_text(
        "task: policy\nenvironment: pusht\ndata: {observe: keypoints}\n"
        "generator: {options: {widths: [8, 16], kernel_size: 3}}\n"
    )
    record = measure_methods([str(small)], tmp_path / "latency.json", batches=[2], repeats=1)
    assert [row["network_calls"] for row in record["rows"]] == [1, 10, 100]
    assert [row["batch"] for row in record["rows"]] == [2, 2, 2]
    times = [row["milliseconds"] for row in record["rows"]]
    assert times[0] < times[1] < times[2]
    assert json.loads((tmp_path / "latency.json").read_text()) == record
    assert record["environment"]["device"] == "cpu"
    assert "| diffusion, DDPM | 100 | 2 |" in capsys.readouterr().out


def test_recipes_without_a_simulated_task():
    with pytest.raises(
        InputError, match="which is no task of the simulators: policy latency takes recipes with one"
    ):
        measure_methods(["two-ways"])
    with pytest.raises(InputError, match="digits is no recipe of a policy"):
        measure_methods(["digits"])

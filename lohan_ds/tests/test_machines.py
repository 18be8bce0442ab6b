"""Machine files: those that ship are whole and sourced; errors name file, key and what is wrong."""
from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from lohan_ds.errors import ConfigError
from lohan_ds.planner.machines import RATES, SIZES, load, names, parse
from lohan_ds.tests.planner_cases import machine


def test_the_machines_that_ship():
    assert {"rtx4090-256gb-12ssd", "rtx4090-768gb-12ssd", "rtx4090-128gb-2ssd", "rtx3090-64gb-1ssd"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_every_number_that_ships_has_a_source(name):
    box = load(name)
    assert box.profile.name == name
    assert set(box.sources) == {*RATES, *SIZES, "ssd_rated_write_bytes"}
    assert f"{box.num_ssds}ssd" in name
    assert load(f"{name}.json") == box


def test_a_profile_written_as_json_comes_back(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(machine(unified=True, h2d_bytes_per_s=float("inf")))))
    box = load(str(path))
    assert box.profile == machine(unified=True, h2d_bytes_per_s=float("inf"))
    assert (box.num_ssds, box.sources) == (0, {})


@pytest.mark.parametrize(("change", "message"), [
    ({"host_bytes": "256 GB"}, "host_bytes must be a number, got '256 GB'"),
    ({"host_bytes": 0}, "host_bytes must be more than 0"),
    ({"host_bytes": 0.5}, "host_bytes must be a whole number"),
    ({"ssd_read_bytes_per_s": -1}, "ssd_read_bytes_per_s must be at least 0"),
    ({"h2d_bytes_per_s": {"rate": 1}}, "h2d_bytes_per_s must be a number or"),
    ({"h2d_bytes_per_s": True}, "h2d_bytes_per_s must be a number, got True"),
    ({"ram": 1}, "unknown keys ram"),
    ({"unified": "yes"}, "unified must be true or false"),
    ({"ssd_stripe": 2}, "ssd_stripe must be a list of whole numbers"),
    ({"ssd_stripe": [0, 2, 1], "num_ssds": 2}, "from 0 to num_ssds - 1 (1), got [0, 2, 1]"),
])
def test_wrong_values_are_named(change, message):
    with pytest.raises(ConfigError, match="box.json") as error:
        parse({**asdict(machine()), **change}, "box.json")
    assert message in str(error.value)


def test_missing_keys_and_wrong_files_are_named(tmp_path):
    content = asdict(machine())
    del content["host_bytes"]
    with pytest.raises(ConfigError, match="keys are missing: host_bytes"):
        parse(content, "box.json")
    with pytest.raises(ConfigError, match="a JSON object is needed, got list"):
        parse([], "box.json")
    with pytest.raises(ConfigError, match="no machine of that name; there are .*rtx3090-64gb-1ssd"):
        load("cray-1")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="broken.json: not JSON"):
        load(str(tmp_path / "broken.json"))

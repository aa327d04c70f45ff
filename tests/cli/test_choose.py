"""`polyhead choose`: layouts within a budget, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from polyhead.cli import app


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def test_layouts_of_a_budget_beside_models_that_people_know():
    shown = invoke("choose", "--d-model", 4096, "--layers", 32, "--cache", "128KiB").output
    assert "32/8x128 at 4096" in shown
    assert "llama3.1-8b: 32/8x128 at 4096" in shown
    assert "deepseek-v3: 128x192 over a latent of 576 at 7168" in shown
    assert "rank: with a head_dim of d, a head can separate some exp(d / 8) keys" in shown
    assert "time" not in shown.splitlines()[1]


def test_no_more_than_asked_for_and_times_of_a_machine():
    options = ("--dtype", "float32", "--machine", "cpu-2-cores", "--latency", "1s", "--layers", 4, "--context", 512)
    shown = invoke("choose", "--d-model", 512, *options, "--most", 2).output
    assert "more; show them with --most" in shown
    first, _, _, _, columns, *_ = shown.splitlines()
    assert first == "times of decode on cpu-2-cores (measured, median error 12%, worst 31%)"
    assert "device time  with launch overhead" in columns


def test_the_head_dims_considered_and_excluded_are_printed():
    shown = invoke("choose", "--d-model", 512, "--cache", "64B", "--layers", 1).output
    excluded = "96, 192 (d_model 512 is no multiple of it)"
    over = "32, 64, 128, 256 (every layout with it exceeds the budget)"
    shown = " ".join(shown.split())
    assert f"head_dim considered: 32, 64, 96, 128, 192, 256; excluded: {over}; excluded: {excluded}" in shown
    found = json.loads(invoke("choose", "--d-model", 512, "--cache", "64KiB", "--json").output)
    assert found["head_dims"] == [32, 64, 96, 128, 192, 256]
    assert found["excluded"].keys() == {"96", "192"}


def test_times_of_a_datasheet_are_labelled_as_such():
    options = ("choose", "--d-model", 512, "--cache", "64KiB", "--layers", 4, "--machine", "nvidia-l4")
    assert invoke(*options).output.startswith("times of decode on nvidia-l4 (datasheet estimate, error not measured)\n")
    found = json.loads(invoke(*options, "--json").output)["machine"]
    assert (found["name"], found["kind"], found["error"]) == ("nvidia-l4", "datasheet", None)


def test_nothing_within_a_budget_is_said():
    assert "none of 14 layouts is within the budget" in invoke("choose", "--d-model", 512, "--cache", "1").output


def test_an_int8_cache_is_chosen_beside_models_that_have_none():
    options = ("choose", "--cache", "4KiB", "--d-model", 512, "--cache-dtype", "int8")
    assert "note: latent attention has no int8 cache: deepseek-v2-lite," in invoke(*options).output
    found = json.loads(invoke(*options, "--json").output)
    assert {reference["cache_dtype"] for reference in found["references"]} == {"int8", "bfloat16"}
    assert len(found["notes"]) == 1


def test_a_machine_s_own_dtype_is_taken_with_a_note():
    shown = invoke("choose", "--machine", "cpu-2-cores", "--d-model", 512, "--cache", "16KiB", "--context", 512).output
    assert "note: cpu-2-cores was not calibrated in bfloat16: planned in float32 instead" in shown


def test_json_has_layouts_and_references():
    found = json.loads(invoke("choose", "--parameters", "30M", "--layers", 12, "--latents", "--json").output)
    assert found["considered"] > len(found["layouts"]) > 0
    assert all(layout["parameters"] <= 30_000_000 for layout in found["layouts"])
    assert {reference["name"] for reference in found["references"]} >= {"bert-base", "gpt3-175b", "deepseek-v3"}
    options = ("choose", "--parameters", "30M", "--layers", 12, "--latents", "--most", 2, "--json")
    first = json.loads(invoke(*options).output)
    assert first["layouts"] == found["layouts"][:2]
    assert first["found"] == found["found"] == len(found["layouts"]) > 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--d-model", 512), "a budget must limit parameters, cache bytes per token or time, got no limit"),
        (("--cache", "64KiB"), "without d_model the budget must limit parameters"),
        (("--d-model", 512, "--latency", "2ms"), "needs a machine for its predictions"),
        (("--d-model", 512, "--cache", "3x"), "got '3x'"),
        (("--d-model", 512, "--latency", "soon"), "got 'soon'"),
        (("--d-model", 512, "--parameters", "64KiB"), "got '64KiB'"),
        (("--d-model", 512, "--cache", "64KiB", "--phase", "rest"), "phase must be one of"),
        (("--d-model", 512, "--cache", "64KiB", "--machine", "abacus"), "machine must be one of"),
        (("--d-model", 100, "--cache", "128KiB"), "got d_model 100, which no head_dim divides; use a multiple of 32"),
        (("--parameters", 10), "has 2,621,440 parameters in 32 layers, got a budget of 10; raise it"),
        (("--d-model", 512, "--cache", "64KiB", "--most", -3), "--most must be at least 1, got -3"),
        (("--d-model", 512, "--cache", "64KiB", "--most", 0), "--most must be at least 1, got 0"),
        (("--d-model", 512, "--cache", "64KiB", "--dtype", "int8"), "dtype must be bfloat16"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    assert words in invoke("choose", *arguments, code=2).stderr

"""Two workers together, seen from both: one pair of processes runs all scenarios."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from workers import run

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Return the results of each worker's scenarios."""
    ended = run(["tests/multiprocess/scenarios.py"], 150)
    for each in ended:
        assert each.code == 0, each.output
    return [
        dict(
            json.loads(line.removeprefix("RESULT "))
            for line in each.output.splitlines()
            if line.startswith("RESULT ")
        )
        for each in ended
    ]


def both(results: Results, scenario: str) -> Any:
    """Return the result, which must be the same on both workers."""
    first, second = (each[scenario] for each in results)
    assert first == second
    return first


def test_variables_begin_with_the_value_of_the_first_worker(results):
    assert both(results, "beginnings") == {
        "mirrored": [0.0, 7.0],
        "on_read": 2.0,
        "key": [0, 0],
        "lazily": [0.0],
    }


def test_many_variables_are_agreed_on_at_once(results):
    seen = both(results, "many_beginnings")
    (few, *_), (many, values, others) = seen["few"], seen["many"]
    assert many == few, "as many meetings and programs for 30 variables as for two"
    assert sum(many) < 10
    # Adam's first step is of its learning rate.
    assert values == pytest.approx([max(i - 0.1, 0.0) for i in range(30)], abs=1e-5)
    assert others == [list(range(30)), True, [0, 2]]


def test_a_worker_may_read_a_variable_before_others_have_created_all(results):
    assert both(results, "beginnings_read_by_one") == [1.0, 0.0, 1.0, 2.0]


def test_a_worker_may_read_a_variable_while_others_wait_for_input_or_end(results):
    assert both(results, "beginnings_read_by_one_before_input") == [1.0, [2, 3]]
    assert results[0]["read_by_one_at_the_end"] == 1.0


def test_variables_whose_first_value_did_not_arrive_get_it_later(results):
    assert both(results, "beginnings_cut_off") == ["cut off", 1.0]


def test_a_later_variable_that_differs_is_refused_at_every_use(results):
    messages = both(results, "beginnings_that_differ_further_on")
    assert "worker 0 has 'own 0' of shape () and dtype float32; worker 1 has 'own 1'" in messages[0]
    assert messages == messages[:1] * 3


def test_a_variable_that_differs_is_refused_by_all(results):
    message = both(results, "variables_that_differ")
    assert "worker 0 has shape (2,)" in message
    assert "worker 1 has shape (3,)" in message


def test_different_collectives_are_refused_by_all(results):
    message = both(results, "collectives_that_differ")
    assert "worker 0 came for reduce SUM" in message
    assert "worker 1 came for gather along axis 0" in message
    message = both(results, "eager_meetings_that_differ")
    assert "worker 0 came for reduce SUM" in message
    assert "worker 1 came for reduce MEAN" in message


def test_meetings_with_much_to_say(results):
    seen = both(results, "large_meetings")
    assert "The message of a worker for a huge thing" in seen["refused"]
    assert "is too large: " in seen["refused"]
    assert seen["together"] == [9_000_000] * 2


def test_values_of_different_shapes(results):
    seen = both(results, "shapes_that_differ")
    assert "replica 0: (2,), replica 1: (3,)" in seen["reduce"]
    assert (seen["sum over rows"], seen["mean over rows"], seen["gather"]) == (5.0, 1.0, [5])
    assert "replica 0: float32, replica 1: int32" in seen["dtype"]


def test_different_programs_are_refused_by_all_and_shown(results):
    seen = both(results, "programs_that_differ")
    assert "worker 0 has" in seen["constants"]
    assert "3.25" in seen["constants"]
    assert "4.75" in seen["constants"]
    assert "worker 0 has 'float32[2]'; worker 1 has 'float32[3]'" in seen["shapes"]
    assert "`reading`" in seen["variables"]
    assert seen["afterwards"] == 6.0


def test_plain_arguments_of_compiled_functions(results):
    assert both(results, "plain_arguments") == [12.0, 12.0, 12.0]


def test_values_can_be_fetched_for_logging(results):
    seen = both(results, "fetching")
    assert seen["gather"] == [1.0, 2.0, 1.0, 2.0]
    assert seen["local"] == [[1.0, 2.0]]
    assert seen["mirrored"] == seen["variable"] == seen["common as array"] == [1.0, 2.0]
    assert "Array([1., 2.]" in seen["repr"]
    assert "strategy.gather" in seen["as array"]
    assert seen["own number"]


def test_a_loopback_cluster_is_listened_to_on_loopback_only(results):
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, also inside IPv6
    for each in results:
        assert each["listening"]
        assert set(each["listening"]) <= loopback


def test_print_is_for_the_first_worker(results):
    assert [each["printing"] for each in results] == [
        {"said": "said once\n", "first": True},
        {"said": "", "first": False},
    ]


def test_workers_with_input_of_different_length_end_together(results):
    seen = both(results, "lengths_that_differ")
    steps = [[0, 1, 100, 101], [2, 102, 103], [104, 105], [106, 107], [108]]
    assert seen == {"len": 5, "first": steps, "again": steps}
    # Files of 3 and 8 rows, in batches of 4 over 2 replicas: every row once.
    files = both(results, "shared_by_files_of_different_length")
    assert files == [[0, 1, 10, 11], [2, 12, 13], [14, 15], [16, 17]]


def test_workers_without_input_take_part(results):
    assert both(results, "one_has_nothing") == [[3.0, 7, 1.5]]
    assert both(results, "nobody_has_anything") == 0
    assert both(results, "compiled_over_uneven_input") == {"steps": 4, "total": 28.0}


def test_input_that_fails_is_told_to_all(results):
    first, second = (each["input_that_fails"] for each in results)
    assert first.startswith("The input of worker 1 failed: ArithmeticError: a broken file.")
    assert second == "a broken file"


def test_passes_that_are_left_or_resumed(results):
    assert both(results, "leaving_a_loop") == [0.0, 0.0, 0.0]
    assert both(results, "passes_to_the_end") == 0
    assert both(results, "resuming") == [[2.0, 12.0], [3.0, 13.0], [4.0, 14.0]]
    assert both(results, "resuming_with_an_empty_share") == [[10.0], [11.0]]


def test_other_strategies_in_a_worker(results):
    assert [each["devices_of_one_process"] for each in results] == [1.0, 2.0]
    for each in results:
        assert each["another_strategy"]["replicas"] == 2
        assert "Use one cluster in a process" in each["another_strategy"]["other cluster"]


def test_numbers_of_replicas_are_one_only_if_all_workers_have_it(results):
    assert both(results, "numbers_of_replicas") == {
        "means": [0.5, 7.0, 2.5],
        "plain": [True, False, False],
    }


def test_values_made_by_hand_are_those_of_all_workers(results):
    seen = both(results, "values_made_by_hand")
    assert seen == {"mean": pytest.approx(8 / 5), "gather": [1, 1, 2, 2, 2], "compiled": 8.0}


def test_a_mean_of_gradients_is_one_over_the_rows_of_all_workers(results):
    assert both(results, "means_over_uneven_rows") == pytest.approx([3.0, 6.0, 12.0, 18.0])


def test_only_explicit_calls_wait_for_the_other_worker(results):
    for worker, each in enumerate(results):
        seen = each["meetings_about_shapes"]
        count, message = seen["before"]
        assert count == 0
        assert f"this one has ({2 + worker},)" in message
        assert seen["reduce"] == [3, 5.0]
        assert seen["after"] == [0, [[2], [3]]]
        assert seen["nest"] == [7, [[5.0] * n for n in (1, 2, 3)]]  # one for all shapes
        assert seen["gradient"] == [5, [4.0 * n * (2 + worker) for n in (1, 2, 3)]]
        # The shapes of variables are known.
        assert [seen["written eagerly"], seen["then in a program"]] == [0, 0]
        assert [seen["assigned"], seen["then again"]] == [0, 0]
        assert seen["counted"] == 10.0


def test_values_of_known_shape_are_compared_too(results):
    message = both(results, "results_that_differ")
    assert "replica 0: (3,), replica 1: (2,)" in message


def test_programs_are_shown_where_they_differ(results):
    assert "programs differ: worker 0 has" in both(results, "long_lines_that_differ")


def test_input_of_strings_and_input_that_fails_to_begin(results):
    first, second = (each["strings_and_failing_beginnings"] for each in results)
    assert (first["words"], second["words"]) == (["long", "longer"], ["a", "b"])
    assert "The input of worker 1 failed: OSError: no such file" in first["failure"]
    assert second["failure"] == "no such file"


def test_programs_that_call_python(results):
    assert both(results, "callbacks") == [4.0, [2.0]]


def test_modules_of_flax_begin_with_what_the_first_worker_has(results):
    pytest.importorskip("flax", reason="Flax is not installed: pip install replicax[flax]")
    assert both(results, "flax_modules") == {
        "weight": 0 - 2 * 0.5 * (1 + 2),
        "metric": [6.0, 4],
        "the numbers of worker 0 are those of one device": True,
    }


def test_what_differs_on_one_worker_is_reported_by_all(results):
    told = both(results, "audits")
    (difference,) = told["differences"]
    assert re.fullmatch(r"output on worker 1 differs by 1; rounding explains .*", difference)
    assert difference in told["sampled"]


def test_the_first_worker_exports_and_all_are_told_if_it_fails(results):
    first, second = (each["exports"] for each in results)
    assert (first["there"], second["there"]) == (["model"], [])
    assert first["failure"] == second["failure"]
    assert "could not be written to /dev/null/model: " in first["failure"]


def test_values_of_the_host_are_summed_over_workers(results):
    told = both(results, "values_of_the_host")
    assert (told["sum"], told["python"], told["mean"]) == (3.0, 3.0, 1.5)
    assert told["rows"] == [[3.0, 6.0], [1.0, 2.0]]
    assert (told["chosen"], told["chosen rows"]) == ([2.0, 1.0], [2.0, 4.0])
    assert set(told["to a variable"]) == {3.0}
    assert told["compiled"] == [6.0, 3.0]
    assert set(told["in merge_call"]) == {6.0}
    assert "replica 0: (1,)" in told["shapes"]


def test_the_first_worker_gives_hints_for_all(results):
    first, second = (each["hints"] for each in results)
    assert len(first) == 1
    assert "has been traced 11 times" in first[0]
    assert second == []


def test_a_step_does_little_together(results):
    """Each of these takes a round trip between the workers, or two."""
    seen = both(results, "what_is_done_together")
    assert seen["done"] == [
        "all_gather: reduce SUM of 3 value(s)",
        "run: reduce SUM",
        "all_gather: reduce SUM of 1 value(s)",
        "run: the compiled function `whole_step`",
    ]
    assert (seen["values"], seen["means"]) == ([3.0, 3.0], [1.5, 1.5])

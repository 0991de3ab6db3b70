"""What a stranger once found wrong, line by line, each with the test that it does not come back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ONCE_WRONG = {
    "trace export replaces device nodes, FIFOs and symlinks": (
        "tests/kvd/trace/test_trace.py",
        "test_a_device_a_pipe_and_a_link_stay_what_they_are",
    ),
    "keys cannot be written without /etc/kvd, and the hint is wrong": (
        "tests/kvd/service/test_config.py",
        "test_keys_that_cannot_be_written_come_with_the_next_step",
    ),
    "pip install fails on Debian's own Python, and the unit does not find a venv": (
        "tests/docs/test_install.py",
        "test_kvd_goes_into_an_environment_and_is_linked_to_where_systemd_looks",
    ),
    "--check-config calls good what kvd refuses": (
        "tests/kvd/service/test_config.py",
        "test_settings_with_which_kvd_does_not_start_are_not_good",
    ),
    "a call of kvctl counts as a failed handshake": (
        "tests/kvd/client/test_operator.py",
        "test_a_question_leaves_no_failed_handshake_behind",
    ),
    "tracebacks on a full disk": (
        "tests/kvctl/cli/test_exit_codes.py",
        "test_a_disk_that_is_full_is_one_line",
    ),
    "workers --engine of an unknown engine is empty and 0": (
        "tests/kvctl/commands/test_lists.py",
        "test_workers_of_an_engine_that_is_not_there_are_2_with_near_misses",
    ),
    "an unknown transfer is 1": (
        "tests/kvctl/commands/test_transfers.py",
        "test_an_id_that_nothing_is_known_of_is_2_and_says_so",
    ),
    "an engine that nobody knows is an empty answer": (
        "tests/kvctl/commands/test_transfers.py",
        "test_an_engine_that_nobody_knows_is_2_and_says_which_was_meant",
    ),
    "slow finds nothing at a P50 of 20 ms and a P99 of 2.3 s": (
        "tests/kvctl/commands/test_transfers.py",
        "test_a_long_tail_is_found_unless_its_transfers_are_larger",
    ),
    "benchmark prints the rate beside the ceiling's mark": (
        "tests/kvctl/views/measuring/test_benchmark.py",
        "test_the_line_of_the_ceiling_is_not_taken_for_the_rate",
    ),
    "a report has no date, host, versions and command": (
        "tests/kvctl/views/reports/test_reports.py",
        "test_a_page_says_who_made_it_when_where_with_what_and_how",
    ),
    "a report of a replay has a bar named p50 that sums medians": (
        "tests/kvctl/views/reports/test_reports.py",
        "test_beside_the_middles_of_stages_stands_that_of_whole_transfers_not_their_sum",
    ),
    "a report's legend is clipped": (
        "tests/kvctl/views/reports/test_pictures.py",
        "test_all_of_a_page_is_within_the_window_and_nothing_covers_another",
    ),
    "large engines take long, or do not end": (
        "tests/kvd/topology/test_describe.py",
        "test_pages_that_workers_share_are_cut_once_and_give_the_same_plans",
    ),
    "1,000 x 500 ranks take more than three seconds, and more than a screen": (
        "tests/kvctl/commands/test_planned_topology.py",
        "test_large_engines_are_described_in_under_three_seconds_of_a_core",
    ),
    "rates of top are too low above 500 transfers a minute": (
        "tests/kvctl/commands/test_top.py",
        "test_rates_of_more_transfers_than_are_asked_for_are_those_of_the_time_that_they_took",
    ),
    "kvd init does not see users of sssd": (
        "tests/kvd/service/test_init.py",
        "test_users_and_groups_that_are_in_no_list_of_all_are_found_by_name",
    ),
    "a block size silently becomes another": (
        "tests/kvctl/engines/test_sources.py",
        "test_a_block_size_that_the_model_does_not_allow_is_said",
    ),
    "80 columns wrap every row": (
        "tests/kvctl/views/test_screen.py",
        "test_tables_fit_80_columns",
    ),
    "long ids are cut where they cannot be copied": (
        "tests/kvctl/views/test_screen.py",
        "test_an_id_too_long_for_its_row_stands_below_it_and_whole",
    ),
    "-o wide folds": (
        "tests/kvctl/views/test_screen.py",
        "test_wide_folds_nothing_however_narrow_the_terminal",
    ),
    "-n means three things": (
        "tests/kvctl/cli/test_parsing.py",
        "test_n_is_the_same_option_everywhere",
    ),
    "a duration without a unit is repeated without one": (
        "tests/kvctl/cli/test_parsing.py",
        "test_a_duration_is_repeated_as_it_is_typed",
    ),
    "help has types of Python": (
        "tests/kvctl/cli/test_parsing.py",
        "test_help_has_no_types_of_python_and_each_default_once",
    ),
    "the log's times have no zone": (
        "tests/kvd/service/test_log.py",
        "test_a_time_has_its_offset_so_that_logs_of_hosts_in_other_zones_can_be_laid_beside_each_other",
    ),
    "transfers on a prefiller's host is empty and says nothing of it": (
        "tests/kvctl/commands/test_transfers.py",
        "test_an_answer_without_transfers_says_what_was_looked_for_and_what_else_to_look_for",
    ),
    "the model of x.json is its folder": (
        "tests/kvctl/engines/test_sources.py",
        "test_a_configuration_is_called_by_its_file_or_where_that_is_config_json_by_its_folder",
    ),
}
"""What was wrong, and the file and name of the test that would see it again."""


@pytest.mark.parametrize("line", ONCE_WRONG)
def test_each_line_has_its_test(line: str) -> None:
    path, name = ONCE_WRONG[line]
    nodes = ast.parse((ROOT / path).read_text()).body
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}

# SPDX-License-Identifier: Apache-2.0
"""What a person sees of the `pagoda` program."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch


def test_version_names_torch(pagoda) -> None:
    result = pagoda("--version")
    assert result.returncode == 0
    assert re.match(r"pagoda \d+\.\d+\.\d+ \(torch 2\.11\.0, built against 2\.11\.0\)\n",
                    result.stdout)
    assert torch.__version__.startswith("2.11.0")


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["bench", "base", "--help"],
                                       ["bench", "device", "--help"], ["bench", "io", "--help"],
                                       ["bench", "adam", "--help"], ["bench", "pager", "--help"]])
def test_help_reads_well(pagoda, arguments: list[str]) -> None:
    result = pagoda(*arguments)
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    assert not result.stderr
    assert all(len(line) <= 110 for line in result.stdout.splitlines()), result.stdout


@pytest.mark.parametrize(("arguments", "word"), [
    ([], "a command is required; see 'pagoda --help'"),
    (["bench"], "a command is required; see 'pagoda bench --help'"),
    (["trane"], "unknown command 'trane'; see"),
    (["bench", "adm"], "unknown command 'adm'; did you mean 'adam'? see 'pagoda bench --help'"),
    (["bench", "adam", "--parms", "5"], "unknown option '--parms'; did you mean '--params'? see"),
    (["bench", "adam", "--params", "many"], "many"),
    (["bench", "io", "--dir", "/no/such/directory"], "/no/such/directory"),
    (["bench", "io", "--size", "8 parsecs"], "8 parsecs"),
    (["bench", "pager", "--only", "nonsense"], "nonsense"),
    (["--log", "loud", "bench", "base"], "loud"),
])
def test_a_mistake_gets_one_clear_line_and_code_2(pagoda, arguments: list[str], word: str) -> None:
    result = pagoda(*arguments)
    assert result.returncode == 2, result.stderr
    assert word in result.stderr
    assert not result.stdout
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("pagoda: ")


def rows_of(text: str) -> list[dict]:
    report = json.loads(text)
    assert set(report) == {"rows"}
    for row in report["rows"]:
        assert set(row) == {"name", "value", "unit", "limit", "limit_name", "ratio"}
        assert row["value"] > 0
        if row["limit"] is not None:
            assert row["ratio"] == pytest.approx(row["value"] / row["limit"], rel=1e-3)
    return report["rows"]


def test_bench_base_prints_rows(pagoda) -> None:
    names = [row["name"] for row in rows_of(pagoda("bench", "base", "--json").stdout)]
    assert "trace scope, off" in names


def test_bench_device_prints_rows(pagoda) -> None:
    result = pagoda("bench", "device", "--copy", "16MiB", "--pinned", "64MiB", "--json")
    assert result.returncode == 0, result.stderr
    assert all(row["limit"] for row in rows_of(result.stdout))


def test_bench_adam_prints_rows(pagoda) -> None:
    result = pagoda("bench", "adam", "--params", "200000", "--rounds", "1", "--json")
    assert result.returncode == 0, result.stderr
    rows = rows_of(result.stdout)
    assert len(rows) >= 6
    assert all(row["limit"] for row in rows)


def test_bench_io_prints_rows_and_leaves_nothing(pagoda, tmp_path: Path) -> None:
    result = pagoda("bench", "io", "--dir", str(tmp_path), "--size", "32MiB", "--rounds", "1",
                    "--seconds", "0.2", "--json")
    assert result.returncode == 0, result.stderr
    assert len(rows_of(result.stdout)) >= 6
    assert list(tmp_path.iterdir()) == []


def test_bench_pager_prints_rows(pagoda) -> None:
    result = pagoda("bench", "pager", "--pages", "200", "--steps", "2", "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in rows_of(result.stdout)}
    assert {"observer cost", "prefetch hit rate", "paged step", "bookkeeping per page"} <= set(rows)
    assert rows["prefetch hit rate"]["value"] > 0.9


def test_table_and_json_tell_the_same(pagoda) -> None:
    table = pagoda("bench", "base").stdout
    for row in rows_of(pagoda("bench", "base", "--json").stdout):
        assert row["name"] in table
        assert row["limit_name"] in table


def test_links_only_torch_and_the_system(build: Path) -> None:
    """The binary must run where torch is and our packages are not."""
    for name in ("bin/pagoda", "lib/libpagoda.so"):
        needed = subprocess.run(["readelf", "-d", str(build / name)], check=True, text=True,
                                capture_output=True).stdout
        libraries = re.findall(r"NEEDED.*\[(.*?)\]", needed)
        assert libraries
        known = re.compile(r"^(libtorch_cpu|libc10|libc|libm|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so")
        assert [library for library in libraries if not known.match(library)] == []


def test_stripped_binary_is_small(build: Path, tmp_path: Path) -> None:
    for name in ("bin/pagoda", "lib/libpagoda.so"):
        stripped = tmp_path / "stripped"
        subprocess.run(["strip", "-o", str(stripped), str(build / name)], check=True)
        assert stripped.stat().st_size < 20_000_000

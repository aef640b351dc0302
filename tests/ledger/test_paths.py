import pytest

from art_ray.errors import InvalidNameError
from art_ray.ledger.paths import model_dir, parquet_name, step_files, validate_part

BAD_PARTS = [
    "",
    " ",
    ".",
    "..",
    ".hidden",
    "a/b",
    "a\\b",
    "../up",
    "a\x00b",
    "a\nb",
    "tab\t",
    "\ud800",
    "x" * 300,
    None,
    3,
]


@pytest.mark.parametrize("value", BAD_PARTS, ids=[ascii(value)[:20] for value in BAD_PARTS])
def test_what_cannot_be_one_part_of_a_path_is_refused(value):
    with pytest.raises(InvalidNameError, match="split"):
        validate_part("split", value)


@pytest.mark.parametrize("value", ["val", "qwen3-0.6b", "Größe", "a b", "a..b", "日本", "x" * 200])
def test_ordinary_names_are_parts_of_a_path(value):
    assert validate_part("name", value) == value


def test_the_folder_of_a_model_is_where_art_has_it(tmp_path):
    assert model_dir(tmp_path, "p", "n") == tmp_path / "p" / "models" / "n"
    with pytest.raises(ValueError, match="project"):
        model_dir(tmp_path, "..", "n")


def test_files_of_a_step_are_named_and_found_in_the_order_of_logging(tmp_path):
    names = [parquet_name(7, copy) for copy in (0, 1, 2, 10, 1000)]
    assert names == ["0007.parquet", "0007.001.parquet", "0007.002.parquet", "0007.010.parquet", "0007.1000.parquet"]
    for name in [*reversed(names), "0070.parquet", "0007.parquet.tmp", "10007.parquet"]:
        (tmp_path / name).touch()
    assert [path.name for path in step_files(tmp_path, 7)] == names
    assert parquet_name(12345) == "12345.parquet"
    assert step_files(tmp_path / "absent", 7) == []

"""How the tests are dealt out to the processes that run them.

Tests of one file stay in one process, because they share servers and models. The long files share neither: they are dealt out
in parts, so that no process waits for another at the end.
"""

import zlib

import pytest

PARTS = {"test_chunking.py": 8, "test_notebooks.py": 8, "test_house.py": 2, "test_statistics.py": 4}


def part_of(
    item: pytest.Item,  # a test
) -> str:  # the part of the suite that it is in
    """Tell which tests are run by the same process."""
    count = PARTS.get(item.path.name, 1)
    return f"{item.path.stem}_{zlib.crc32(item.name.encode()) % count}"


@pytest.hookimpl(tryfirst=True)  # before the names of groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its part."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(part_of(item)))

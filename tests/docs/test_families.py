"""docs/families.md has what the tests compare, and no error above theirs."""

from tests.docs.families import stored, stored_errors, table


def test_the_table_of_families_is_that_of_the_tests() -> None:
    errors = stored_errors()
    assert table(errors) == stored(), "python -m tests.docs.families writes it"
    assert all(float(error.lstrip("<")) <= 1e-4 for error in errors.values())

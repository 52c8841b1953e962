import pytest

# conformance.py holds the asserts of many test modules, and pytest explains only those that it is told of.
pytest.register_assert_rewrite("tests.stages.conformance")

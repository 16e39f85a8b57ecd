"""What the checks stand on: the backend under test, fixtures, the pytest plugin, the report."""

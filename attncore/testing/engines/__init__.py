"""Small engines that run a backend under test and compare what it gives."""

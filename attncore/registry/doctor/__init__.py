"""`attncore doctor`: one plugin tried in a child process with a time limit."""

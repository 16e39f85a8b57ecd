"""A line for ``attncore build`` with one field changed."""

import json


def changed_line(example, path, value):
    """``example`` as JSON with the field at ``path`` ("groups.0.is_prompt") replaced; value ... removes it."""
    line = json.loads(json.dumps(example))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = line
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(line)

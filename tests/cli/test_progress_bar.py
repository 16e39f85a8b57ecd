"""The progress bar of commands on a terminal."""

from rich.progress import Progress

from attncore.cli.progress_bar import STEADY, remaining_column


def test_no_end_is_foretold_before_it_is_steady():
    column = remaining_column()
    with Progress(column, disable=True) as bar:
        number = bar.add_task("requests", total=1000)
        for done, told in ((1, False), (STEADY * 10 - 1, False), (STEADY * 10, True)):
            bar.update(number, completed=done)
            assert bool(column.render(bar.tasks[0]).plain) is told

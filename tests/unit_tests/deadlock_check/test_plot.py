"""The picture of a timeline."""

import pytest
from matplotlib.image import imread

from tests.unit_tests.deadlock_check.small_traces import (
    BATCHES,
    ONE_BY_ONE,
    meeting_of_two_stages,
    ring,
)
from tools.deadlock_check import model, plot
from tools.deadlock_check.errors import UsageError


def timeline(trace, machine):
    return model.run(trace, machine, with_timeline=True)


def artists(figure, gid):
    return figure.findobj(lambda artist: artist.get_gid() == gid)


@pytest.mark.parametrize("size", [2, 32])
def test_the_file_is_a_picture_of_sane_size(tmp_path, size):
    trace, path = ring(size), tmp_path / "ring.png"
    plot.plot(trace, timeline(trace, ONE_BY_ONE), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    height, width = imread(path).shape[:2]
    assert 500 < width <= plot.MAX_WIDTH * plot.DOTS_PER_INCH
    assert 150 < height <= (plot.MAX_HEIGHT + 2) * plot.DOTS_PER_INCH


def test_the_cycle_is_boxes_with_an_arrow_each():
    trace = meeting_of_two_stages()
    outcome = timeline(trace, ONE_BY_ONE)
    figure = plot.draw(trace, outcome)
    (boxes,) = artists(figure, plot.STUCK_GID)
    in_cycle = {dependence.waiter for dependence in outcome.cycle}
    assert len(boxes.get_paths()) == len(in_cycle | set(outcome.stuck.values()))
    assert len(artists(figure, plot.CYCLE_GID)) == len(outcome.cycle) == 4


def test_nothing_is_stuck_in_the_picture_of_a_safe_run():
    trace = meeting_of_two_stages()
    figure = plot.draw(trace, timeline(trace, BATCHES))
    assert not artists(figure, plot.STUCK_GID)
    assert not artists(figure, plot.CYCLE_GID)
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(numbers) == ["2", "2", "3", "3"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    trace, path = ring(2), tmp_path / "no_such_folder" / "timeline.png"
    with pytest.raises(UsageError, match=str(path)):
        plot.plot(trace, timeline(trace, BATCHES), path)

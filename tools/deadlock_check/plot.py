"""A picture of the pipeline on the logical clock: what each rank does, and what never ends."""

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch

from .errors import UsageError
from .outcome import Issued, Outcome, Span
from .trace import Batch, Compute, Operation, Trace, Transfer
from .wording import Wording

CAPTION = "logical clock (forward: light, 1; backward: dark, 2); bars: sends, receives, collectives"
STUCK_GID = "stuck"
CYCLE_GID = "cycle"

STUCK_COLOUR = "#d62728"
BLOCKED_COLOUR = "#f4b6b2"
STUCK_PANEL_COLOUR = "#fdecea"
MESSAGE_COLOURS = {"shape message": "#e69f00", "data message": "#4d4d4d", "collective": "#8c564b"}
# None is red, which is for what is stuck.
CHUNK_COLOURS = ("tab:blue", "tab:green", "tab:purple", "tab:cyan", "tab:olive", "tab:pink")

DOTS_PER_INCH = 110
MAX_WIDTH, MAX_HEIGHT = 45.0, 40.0
LABEL_WIDTH, TITLE_HEIGHT, AXIS_HEIGHT = 1.35, 0.8, 0.5
STUCK_WIDTH, ARROW_WIDTH = 3.3, 1.3
MIN_TIMELINE_WIDTH = 5.0

# Top and height within a row of height 1, counted downwards.
COMPUTE_LANE = (0.08, 0.48)
SEND_LANE, RECEIVE_LANE, COLLECTIVE_LANE = (0.60, 0.11), (0.72, 0.11), (0.84, 0.08)
BATCH_LANE = (SEND_LANE[0], 0.23)
STUCK_LANE = (0.05, 0.90)
Lane = tuple[float, float]

MIN_LENGTH = 0.02
MIN_FONT_SIZE, MAX_FONT_SIZE, TITLE_FONT_SIZE = 3.5, 8.5, 10
CHARACTER_WIDTH, POINTS_PER_INCH = 0.65, 72


def plot(trace: Trace, outcome: Outcome, path: Path) -> None:
    """Draw a timeline into a file.

    Args:
        trace: What was checked.
        outcome: What the model found, with its timeline.
        path: File to write; its ending says in which format.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        draw(trace, outcome).savefig(path)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot write it ({error}); name another file") from None


def draw(trace: Trace, outcome: Outcome) -> Figure:
    """Return the picture that ``plot`` writes.

    Boxes are forwards and backwards with their microbatch, coloured by model chunk; the bars below
    them are messages, sends above receives. What never ends is red, and stands once more, named, at
    the right edge, where arrows lead from each operation of a cycle to the one that it waits for.

    Args:
        trace: What was checked.
        outcome: What the model found, with its timeline.
    """
    return _Picture(trace, outcome).figure


class Box(NamedTuple):
    """A rectangle; the vertical axis points down and counts ranks."""

    left: float
    top: float
    width: float
    height: float

    @property
    def corners(self) -> list[tuple[float, float]]:
        """Its four corners, in a circle."""
        right, bottom = self.left + self.width, self.top + self.height
        return [(self.left, self.top), (right, self.top), (right, bottom), (self.left, bottom)]

    @property
    def right_middle(self) -> tuple[float, float]:
        """Where arrows begin and end."""
        return self.left + self.width, self.top + self.height / 2


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Sizes in inches, and the length of the clock.

    Attributes:
        duration: End of the last thing that ends.
        unit: Inches of a unit of the clock.
        row: Inches of a rank.
        right: Inches right of the timeline, for what is stuck.
    """

    duration: float
    unit: float
    row: float
    right: float

    @classmethod
    def of(cls, trace: Trace, outcome: Outcome) -> "_Layout":
        times = [time for span in outcome.spans for time in (span.begin, span.end)]
        duration = max([1.0, *filter(math.isfinite, times)])
        right = STUCK_WIDTH + ARROW_WIDTH if outcome.stuck else 0.3
        room = MAX_WIDTH - LABEL_WIDTH - right
        return cls(
            duration=duration,
            unit=min(room / duration, max(0.3, MIN_TIMELINE_WIDTH / duration)),
            row=min(0.75 if outcome.stuck else 0.6, MAX_HEIGHT / trace.world_size),
            right=right,
        )


class _Picture:
    """Draws; what is drawn is in ``figure``."""

    def __init__(self, trace: Trace, outcome: Outcome) -> None:
        self._trace = trace
        self._outcome = outcome
        self._wording = Wording(trace)
        self._layout = _Layout.of(trace, outcome)
        self._rows = self._rows_of_ranks()
        self.figure, self._axes = self._canvas()
        self._draw_computations()
        self._draw_messages()
        if outcome.stuck:
            self._draw_stuck()
        self._draw_legend()

    def _rows_of_ranks(self) -> dict[int, int]:
        """Pipeline by pipeline from the top, each in stage order."""
        in_pipelines = [rank for ranks in self._wording.pipelines for rank in ranks]
        others = sorted(set(range(self._trace.world_size)) - set(in_pipelines))
        return {rank: row for row, rank in enumerate(in_pipelines + others)}

    def _canvas(self) -> tuple[Figure, Axes]:
        layout, ranks = self._layout, len(self._rows)
        inner = layout.duration * layout.unit + layout.right
        width = LABEL_WIDTH + inner + 0.1
        height = TITLE_HEIGHT + ranks * layout.row + AXIS_HEIGHT
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH)
        axes = figure.add_axes(
            (LABEL_WIDTH / width, AXIS_HEIGHT / height, inner / width, ranks * layout.row / height)
        )
        axes.set_xlim(0, inner / layout.unit)
        axes.set_ylim(ranks, 0)
        axes.set_yticks(
            [row + 0.5 for row in self._rows.values()],
            [self._wording.rank(rank) for rank in self._rows],
            fontsize=8,
        )
        axes.tick_params(left=False, labelsize=8)
        axes.set_xlabel(CAPTION, fontsize=8, loc="left")
        for row in range(1, ranks):
            axes.axhline(row, color="#dddddd", linewidth=0.6, zorder=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= layout.duration])
        self._write_title(figure)
        return figure, axes

    def _write_title(self, figure: Figure) -> None:
        width, height = figure.get_size_inches()
        verdict = self._outcome.verdict
        room = (width - 0.2) * POINTS_PER_INCH / (CHARACTER_WIDTH * TITLE_FONT_SIZE)
        title = f"{verdict.value}: {self._trace.description}"
        figure.text(
            0.1 / width,
            1 - 0.12 / height,
            textwrap.shorten(title, int(room), placeholder=" ..."),
            fontsize=TITLE_FONT_SIZE,
            fontweight="bold",
            va="top",
            color="black" if verdict.is_safe else STUCK_COLOUR,
        )

    def _draw_computations(self) -> None:
        boxes, colours = [], []
        for span, operation in self._spans():
            if not isinstance(operation, Compute):
                continue
            is_forward = operation.direction == "forward"
            boxes.append(self._box(span, COMPUTE_LANE))
            colours.append(_chunk_colour(operation.place.chunk, is_forward))
            if operation.place.microbatch is not None:
                self._write_in(boxes[-1], str(operation.place.microbatch), is_dark=not is_forward)
        self._add(boxes, colours, edgecolors="white", linewidths=0.5)

    def _draw_messages(self) -> None:
        boxes, colours = [], []
        wrong = {
            issued
            for finding in self._outcome.findings
            if not finding.verdict.is_safe
            for issued in finding.where
        }
        for span, operation in self._spans():
            if isinstance(operation, Compute):
                continue
            lane, kind = _message_lane(operation)
            is_wrong = math.isinf(span.end) or span.issued in wrong
            boxes.append(self._box(span, lane))
            colours.append(STUCK_COLOUR if is_wrong else MESSAGE_COLOURS[kind])
        self._add(boxes, colours)

    def _spans(self) -> Iterator[tuple[Span, Operation]]:
        for span in self._outcome.spans:
            operation = span.issued.operation(self._trace)
            if operation is not None and math.isfinite(span.begin):
                yield span, operation

    def _box(self, span: Span, lane: Lane) -> Box:
        top = self._rows[span.issued.rank] + lane[0]
        end = max(min(span.end, self._layout.duration), span.begin + MIN_LENGTH)
        return Box(span.begin, top, end - span.begin, lane[1])

    def _write_in(self, box: Box, text: str, is_dark: bool) -> None:
        room = min(
            box.width * self._layout.unit / (CHARACTER_WIDTH * max(2, len(text))),
            box.height * self._layout.row,
        )
        size = min(MAX_FONT_SIZE, room * POINTS_PER_INCH * 0.8)
        if size >= MIN_FONT_SIZE:
            self._axes.text(
                box.left + box.width / 2,
                box.top + box.height / 2,
                text,
                fontsize=size,
                color="white" if is_dark else "black",
                ha="center",
                va="center_baseline",
                clip_on=True,
            )

    def _add(self, boxes: list[Box], colours: list[str], **properties: Any) -> None:
        corners = [box.corners for box in boxes]
        self._axes.add_collection(PolyCollection(corners, facecolors=colours, **properties))

    def _draw_stuck(self) -> None:
        left, inch = self._layout.duration, 1 / self._layout.unit
        panel = Box(left, 0, self._layout.right * inch, len(self._rows))
        self._add([panel], [STUCK_PANEL_COLOUR], zorder=0)
        in_cycle = [dependence.waiter for dependence in self._outcome.cycle]
        boxes: dict[Issued, Box] = {}
        for rank, stuck in _by_rank([*in_cycle, *self._outcome.stuck.values()]).items():
            height = STUCK_LANE[1] / max(2, len(stuck))
            for slot, issued in enumerate(stuck):
                top = self._rows[rank] + STUCK_LANE[0] + slot * height
                box = Box(left + 0.1 * inch, top, STUCK_WIDTH * inch, height * 0.92)
                boxes[issued] = box
                self._write_in(box, self._wording.label(issued), is_dark=issued in in_cycle)
        colours = [STUCK_COLOUR if issued in in_cycle else BLOCKED_COLOUR for issued in boxes]
        self._add(list(boxes.values()), colours, gid=STUCK_GID)
        for dependence in self._outcome.cycle:
            self._draw_arrow(boxes[dependence.waiter], boxes[dependence.target])

    def _draw_arrow(self, waiter: Box, target: Box) -> None:
        inches = abs(target.top - waiter.top) * self._layout.row
        bulge = min(0.9, 1.7 * ARROW_WIDTH / inches)
        # A positive one bends to the right on the way up.
        downwards = target.top > waiter.top
        arrow = FancyArrowPatch(
            waiter.right_middle,
            target.right_middle,
            connectionstyle=f"arc3,rad={-bulge if downwards else bulge}",
            arrowstyle="-|>",
            mutation_scale=9,
            color=STUCK_COLOUR,
            gid=CYCLE_GID,
        )
        self._axes.add_patch(arrow)

    def _draw_legend(self) -> None:
        operations = [operation for _, operation in self._spans()]
        chunks = {op.place.chunk or 0 for op in operations if isinstance(op, Compute)}
        kinds = {_message_lane(op)[1] for op in operations if not isinstance(op, Compute)}
        entries = [(f"chunk {c}", _chunk_colour(c, is_forward=False)) for c in sorted(chunks)]
        entries += [(k, colour) for k, colour in MESSAGE_COLOURS.items() if k in kinds]
        if self._outcome.stuck:
            entries += [("never ends", STUCK_COLOUR), ("waits for it", BLOCKED_COLOUR)]
        self.figure.legend(
            handles=[Patch(color=colour, label=name) for name, colour in entries],
            loc="upper left",
            bbox_to_anchor=(0, 1 - 0.36 / self.figure.get_figheight()),
            ncols=len(entries),
            fontsize=8,
            frameon=False,
            handlelength=1.0,
            columnspacing=1.2,
        )


def _by_rank(issued: Iterable[Issued]) -> dict[int, list[Issued]]:
    found: dict[int, list[Issued]] = {}
    for one in dict.fromkeys(issued):
        found.setdefault(one.rank, []).append(one)
    return found


def _chunk_colour(chunk: int | None, is_forward: bool) -> str:
    colour = CHUNK_COLOURS[(chunk or 0) % len(CHUNK_COLOURS)]
    if not is_forward:
        return colour
    red, green, blue = (1 - (1 - part) * 0.4 for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _message_lane(operation: Operation) -> tuple[Lane, str]:
    match operation:
        case Transfer():
            lane = SEND_LANE if operation.is_send else RECEIVE_LANE
            return lane, f"{operation.content or 'data'} message"
        case Batch():
            return BATCH_LANE, f"{operation.transfers[0].content or 'data'} message"
        case _:
            return COLLECTIVE_LANE, "collective"

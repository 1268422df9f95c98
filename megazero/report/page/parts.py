"""What the parts of a page are made from: plain values, which know nothing of a run or of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Cell = str | float | int | None
"""Of a table. None is shown as a dash, and stands behind all values however the table is sorted."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    name   its heading
    shows  how numbers are written: a key of `tables.WRITTEN`. "text" is for words, which are sorted as such
    note   a sentence about it, shown when a pointer or the keyboard is on the heading
    """

    name: str
    shows: str = "text"
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table that a reader can sort and search.

    title    its heading; "" for none
    columns  from left to right
    rows     a cell for each column, in the order in which they are shown first
    note     a paragraph below the heading
    marked   rows to be seen first, as numbers of `rows`
    quiet    rows that are hidden until the reader asks for all; the word for asking is `more`
    """

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    marked: frozenset[int] = frozenset()
    quiet: frozenset[int] = frozenset()
    more: str = "show all rows"


@dataclass(frozen=True)
class MemoryBar:
    """The memory of a stage as one bar.

    label  whose it is: "stage 3"
    parts  name -> bytes, from left to right. Names that all bars share have one colour
    limit  bytes that a device has; None: not known
    note   where the peak is, and what is alive there
    """

    label: str
    parts: Mapping[str, int]
    limit: int | None = None
    note: str = ""


@dataclass(frozen=True)
class GanttSpan:
    """What a lane does from start to end, in the unit of its chart. kind: a key of the chart's colours."""

    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True)
class GanttLane:
    """A row. group: what neighbouring rows share, as "stage 0". Spans may overlap no other one of their lane."""

    name: str
    spans: Sequence[GanttSpan]
    group: str = ""


@dataclass(frozen=True)
class Gantt:
    """What lanes do over time.

    title   its heading
    lanes   from top to bottom
    kinds   name -> colour, in the order of the key
    unit    of times: "s", or "" for units of a schedule
    note    a paragraph below the heading
    """

    title: str
    lanes: Sequence[GanttLane]
    kinds: Mapping[str, str]
    unit: str = "s"
    note: str = ""


@dataclass(frozen=True)
class Mark:
    """Something that happened, in a row of its own. at: axis -> place; it is drawn on the axes that have one.

    kind   word that rows and the key show: "save"
    until  axis -> the end, of what took several steps
    """

    kind: str
    words: str
    at: Mapping[str, float]
    until: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Points:
    """Numbers that are not there for each step: evaluations. axes: axis -> a place for each value."""

    axes: Mapping[str, Sequence[float]]
    values: Sequence[float]


@dataclass(frozen=True)
class Series:
    """A run as lines. NaN is a gap.

    name      of the run
    columns   key -> a number for each step, axes among them
    starts    first steps of the processes that made them, as numbers of steps. On an axis other than "hours" a process
              may begin before the end of the one before it: then its steps count, and those of the one before are pale
    points    key -> numbers of evaluations
    marks     in the order in which they happened
    """

    name: str
    columns: Mapping[str, Sequence[float]]
    starts: Sequence[int] = (0,)
    points: Mapping[str, Points] = field(default_factory=dict)
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Axis:
    """A column by which charts are drawn. again: whether steps that are run again go on along it, as hours do."""

    key: str
    name: str
    again: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines, one for each run and column.

    title      its heading
    lines      key -> name of a column; the name is shown if there are several
    unit       behind numbers
    shows      how numbers are written: "number", "count", "bytes" or "seconds"
    points     key -> name of evaluations that are drawn as dots with a line
    log        whether it begins with a logarithmic axis
    zero       whether the axis includes 0
    smooth     whether a mean over steps says something: not of what a run sets, as its learning rate
    levels     (name, value) of horizontal lines: what was predicted
    """

    title: str
    lines: Mapping[str, str]
    unit: str = ""
    shows: str = "number"
    points: Mapping[str, str] = field(default_factory=dict)
    log: bool = False
    zero: bool = False
    smooth: bool = True
    levels: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Fact:
    """A number at the head of a page. tone: "good", "bad" or "" for the colour of its mark."""

    name: str
    value: str
    note: str = ""
    tone: str = ""

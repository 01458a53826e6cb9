r"""
# Views of a tape: data, a trace and a figure

`data_files` writes recorded steps as the data of the pages' scripts. `chrome_trace` converts one to
the format of profilers' viewers, and `staircase` draws one as a figure.

All need only the tapes that `tape.py` records. The trace has a time axis, so it shows how long each
communication takes and how it overlaps computation. The pages and the figure show events in order,
without times, so that short events are visible.

**Run this**: `python -m docs.tape --out DIR`, and open `trace.json` in https://ui.perfetto.dev.

**Not covered, and what that costs**: waiting for a core is not recorded. If ranks share two busy
cores, the length of a span says little.
"""

import json
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import Any

Json = dict[str, Any]


def data_files(tapes: dict[str, Json]) -> dict[str, str]:
    """
    ## The data of the pages' scripts: a file for each recording, and one with the source

    A page that is opened from a file cannot fetch data, but it can load a script. So each file is a
    script that assigns a recording, and a page loads those that the reader chooses.

    The source of all functions in call stacks is in a file of its own, because only one page shows
    it. All recordings get the same scale, so that a reader can compare the curves.
    """
    most_bytes = max(max(tape["ranks"][0]["predicted"]["peak_bytes"],
                         tape["data_parallel"]["peak_bytes"]) for tape in tapes.values())
    found = {f"tape-{key}.js": _script("TAPES", key, _drawn(tape) | {"most_bytes": most_bytes})
             for key, tape in tapes.items()}
    functions = {}
    for tape in tapes.values():
        functions |= tape["functions"]
    return found | {"tape-source.js": _script("TAPES", "source", functions)}


def _script(owner: str, key: str, data: Json) -> str:
    text = json.dumps(data, separators=(",", ":"))
    return f'(window.{owner} ||= {{}})["{key}"] = {text};\n'


def _drawn(tape: Json) -> Json:
    """
    #### What a script draws: the events of rank 0, which are those of all ranks

    Only their times differ. Raises `ValueError` if anything else does.
    """
    kept = ("layer", "phase", "event", "live_bytes", "text", "lines")
    first, *others = [{
        "events": [{name: e[name] for name in kept} for e in rank["events"]],
        "frames": rank["frames"], "scenes": rank["scenes"], **rank["predicted"],
    } for rank in tape["ranks"]]
    if any(other != first for other in others):
        raise ValueError("expected the same events, bytes and lines on all ranks; got others")
    same = ("layers", "world_size", "prefetch", "leave", "device", "torch", "commit")
    return {name: tape[name] for name in same} | first | {
        "data_parallel_bytes": tape["data_parallel"]["peak_bytes"]}


def compared(tapes: dict[str, Json]) -> list[list[str]]:
    """
    ## A table of all recordings: memory and communication of a rank, in bytes

    The cells of each row; the first row is the header. Activations that leave change none of these
    bytes, so their recordings are left out.
    """
    rows = [["ranks", "prefetch", "between steps", "at the peak", "sent in a step"]]
    for tape in (tape for tape in tapes.values() if not tape["leave"]):
        measured = tape["ranks"][0]["measured"]
        rows.append([str(tape["world_size"]), "yes" if tape["prefetch"] else "no",
                     *(f"{measured[name]:,}" for name in ("rest_bytes", "peak_bytes",
                                                           "sent_bytes"))])
    return rows


def chrome_trace(tape: Json) -> Json:
    """
    ## The tape in the Chrome trace event format

    Each rank is a process. It has a thread for computation, and one for each communication in
    flight at the same time, because the spans of a thread must not overlap. The optimizer step is
    recorded at its end, so its span begins at the previous event.
    """
    made: list[Json] = []
    for rank in tape["ranks"]:
        pid = rank["rank"]
        lanes: list[float] = []  # the end of the last span of each thread for messages, in µs
        made.append(_meta("process_name", pid, 0, f"rank {pid}"))
        made.append(_meta("thread_name", pid, 1, "compute"))
        for name, thread, begin_us, end_us, args in _spans(rank["events"]):
            tid = 1
            if thread == "messages":
                free = [i for i, until_us in enumerate(lanes) if until_us <= begin_us]
                lane = free[0] if free else len(lanes)
                if not free:
                    lanes.append(0)
                    made.append(_meta("thread_name", pid, 2 + lane,
                                      f"messages {lane + 1}" if lane else "messages"))
                lanes[lane] = end_us
                tid = 2 + lane
            made.append({"ph": "X", "name": name, "cat": thread, "pid": pid, "tid": tid,
                         "ts": begin_us, "dur": round(end_us - begin_us, 3), "args": args})
        for e in rank["events"]:
            made.append({"ph": "C", "name": "live bytes", "pid": pid, "tid": 0,
                         "ts": _us(e), "args": {"bytes": e["live_bytes"]}})
    # Names first, then events by time.
    made.sort(key=lambda each: (each["ph"] != "M", each["ts"]))
    return {"traceEvents": made, "displayTimeUnit": "ms", "otherData": {
        key: str(tape[key]) for key in ("device", "torch", "commit", "world_size")}}


def _spans(events: list[Json]) -> list[tuple[str, str, float, float, Json]]:
    """
    #### Name, thread, begin, end and arguments of each span, ordered by begin
    """
    begun: dict[tuple[str, str], Json] = {}
    ended = {"gathered": ("fetch", "unshard", "messages"), "reduced": ("reduce", "reduce",
             "messages"), "computed": ("compute", "forward", "compute"),
             "free": ("compute", "backward", "compute")}
    found = []
    for before, e in zip([None, *events], events, strict=False):
        name = e["layer"]
        args = {"line": "{}:{} {}".format(*e["lines"][0])}
        if e["event"] in ("fetch", "compute", "reduce"):
            begun[name, e["event"]] = e
        elif e["event"] in ended:
            begin, what, thread = ended[e["event"]]
            if first := begun.pop((name, begin), None):
                args |= {"bytes": first["sent_bytes"]} if thread == "messages" else {}
                found.append((f"{what} {name}", thread, _us(first), _us(e), args))
        elif e["event"] in ("norm", "step"):
            found.append((f"{e['event']} {name}", "compute", _us(before or e), _us(e), args))
    return sorted(found, key=lambda each: each[2])


def _us(e: Json) -> float:
    return round(e["time_s"] * 1e6, 3)


def _meta(kind: str, pid: int, tid: int, name: str) -> Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


# Explanations of the phases.
ABOUT = {"forward": ("a layer is gathered, computes,", "and is freed"),
         "backward": ("again, and its full gradient", "stays until it is reduced")}
# The colours to use if no style sheet defines them.
COLORS = {"fg": "#1b1f24", "muted": "#59636e", "accent": "#0b57a4", "c-shard": "#2f6db3",
          "c-whole": "#7db4e6", "c-grad": "#cf5f12"}
# The same on a dark page that has no style sheet of ours, as in `book.css`.
DARK = {"fg": "#dfe4e8", "muted": "#9ba6b0", "accent": "#74b7f3", "c-shard": "#5b9bea",
        "c-whole": "#3f78b5", "c-grad": "#f58a45"}


class _Plot:
    """
    ### The coordinates of events and bytes, in a figure of this size
    """

    def __init__(self, tape: Json, width: int, height: int):
        rank = tape["ranks"][0]
        self.events = rank["events"]
        self.predicted = rank["predicted"]
        self.plain_bytes = tape["data_parallel"]["peak_bytes"]
        self.left = 8
        self.right = width - 8
        self.top = 40
        self.bottom = height - 34

    def x(self, number: int) -> float:
        across = (self.right - self.left) / (len(self.events) + 1)
        return round(self.left + number * across, 1)

    def y(self, nbytes: int) -> float:
        return round(self.bottom - nbytes / (1.06 * self.plain_bytes) * (self.bottom - self.top), 1)

    def line(self) -> str:
        rest = self.predicted["rest_bytes"]
        live = [rest, *(e["live_bytes"] for e in self.events)]
        steps = "".join(f"V{self.y(nbytes)}H{self.x(i)}" for i, nbytes in enumerate(live, start=1))
        # After the last event `zero_grad` frees the gradients of the shards.
        return f"M{self.x(0)},{self.y(rest)}{steps}V{self.y(rest)}"

    def phases(self, words: bool) -> Iterator[str]:
        number = 1
        for i, (phase, run) in enumerate(groupby(self.events, key=lambda e: e["phase"])):
            begin = number
            number += len([*run])
            yield _rect(self.x(begin), self.top, self.x(number) - self.x(begin),
                        self.bottom - self.top, "muted", 0.14 if i % 2 else 0.06)
            yield _text(self.x(begin) + 4, self.top - 8, phase)
            for down, about in enumerate(ABOUT.get(phase, ()) if words else ()):
                yield _text(self.x(begin) + 6, self.y(self.plain_bytes) + 42 + 17 * down, about,
                            "muted")

    def levels(self) -> Iterator[str]:
        rest = self.predicted["rest_bytes"]
        peak = self.predicted["peak_bytes"]
        for nbytes, name, color, down in (
                (self.plain_bytes, "plain data parallel training, peak", "muted", 17),
                (peak, "peak, predicted and measured", "c-grad", -6),
                (rest, "at rest, predicted and measured", "c-shard", 17)):
            yield (f'<path d="M{self.left},{self.y(nbytes)}H{self.right}" style="fill:none;'
                   f'stroke-width:1.5;stroke-dasharray:5 4;{_paint("stroke", color)}"/>')
            yield _text(self.left + 6, self.y(nbytes) + down, f"{name}: {nbytes:,} bytes")


def staircase(tape: Json, width: int = 640, height: int = 330) -> str:
    """
    ## The memory of rank 0 during one step, as an SVG

    * `width` may be 360 for a phone; text keeps its size, and the explanations are omitted

    Colours are custom properties of the site's style sheet, with a default for each.
    """
    plot = _Plot(tape, width, height)
    ranks = tape["world_size"]
    rest = plot.predicted["rest_bytes"]
    peak = plot.predicted["peak_bytes"]
    about = (f"Live bytes of rank 0 after each of the {len(plot.events)} events of one training "
             f"step on {ranks} ranks. Between steps it holds {rest:,} bytes. The curve rises to "
             f"{peak:,} as layers are gathered and gradients allocated, and falls as they are "
             f"freed. Plain data parallel training holds {plot.plain_bytes:,} at its peak.")
    line = plot.line()
    below = plot.y(rest)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'class="staircase" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>Memory of one rank during a step</title><desc>{escape(about)}</desc>",
        *plot.phases(words=width >= 560),
        f'<path d="{line}Z" style="fill-opacity:.35;{_paint("fill", "c-whole")}"/>',
        _rect(plot.left, below, plot.right - plot.left, plot.bottom - below, "c-shard", 0.35),
        *plot.levels(),
        f'<path d="{line}" style="fill:none;stroke-width:2;{_paint("stroke", "accent")}"/>',
        _text(plot.left, height - 12, f"{len(plot.events)} events of one step, in order; rank 0 of "
              f"{ranks}", "muted"),
        "</svg>"])


def alone(drawing: str) -> str:
    """
    ## The same drawing as a file of its own, such as the README shows

    It follows the light or dark theme of whoever looks at it.
    """
    colors = "".join(f"--{name}:{value};" for name, value in DARK.items())
    style = f"<style>@media (prefers-color-scheme:dark){{svg{{{colors}}}}}</style>"
    return drawing.replace("<title>", f"{style}\n<title>", 1) + "\n"


def _rect(x: float, y: float, width: float, height: float, color: str, opacity: float) -> str:
    return (f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height:.1f}" '
            f'style="fill-opacity:{opacity};{_paint("fill", color)}"/>')


def _text(x: float, y: float, text: str, color: str = "fg") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{_paint("fill", color)}">{escape(text)}</text>'


def _paint(what: str, name: str) -> str:
    return f"{what}:var(--{name},{COLORS[name]})"

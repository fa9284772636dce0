"""Record a program in a terminal and draw docs/run-light.svg and docs/run-dark.svg, which play it:

    pip install pyte
    python docs/record_run.py train.py --config configs/demo.py --workdir runs/demo

The arguments are those of `python`. The recording plays eight times as fast, in a loop. Readers
who ask their system for less motion see the last screen.
"""

import fcntl
import os
import pty
import struct
import sys
import termios
import time
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

COLUMNS = 100
ROWS = 17
SPEED = 8
SECONDS_BETWEEN_FRAMES = 4.0  # of the program; messages that appear in between do not wait
SECONDS_AT_THE_END = 5.0  # of the picture
WIDTH = 8.4  # of a character, in pixels
HEIGHT = 18.0  # of a line
LEFT = 14.0
TOP = 36.0

THEMES = {
    "light": {
        "background": "#f6f8fa",
        "border": "#d0d7de",
        "default": "#1f2328",
        "dim": "#59636e",
        "cyan": "#1b7c83",
        "3a3a3a": "#d0d7de",  # the part of the bar that is to come
        "ff005f": "#cf222e",
        "5faf00": "#1a7f37",
    },
    "dark": {
        "background": "#0d1117",
        "border": "#3d444d",
        "default": "#e6edf3",
        "dim": "#9198a1",
        "cyan": "#39c5cf",
        "3a3a3a": "#3d444d",
        "ff005f": "#f85149",
        "5faf00": "#3fb950",
    },
}

Run = tuple[int, str, str]  # first column, text, color
Row = tuple[Run, ...]
Frame = tuple[float, list[Row]]  # seconds since the start, rows of the screen


def record(arguments: list[str]) -> list[tuple[float, str]]:
    """Output of `python` with these arguments in a terminal, with times in seconds."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, *arguments])
    size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    began = time.monotonic()
    output = []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the program has ended
            break
        text = data.decode("utf-8", "replace")
        output.append((time.monotonic() - began, text))
        sys.stdout.write(text)
        sys.stdout.flush()
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit("The program failed; no picture was drawn.")
    return output


def frames(command: str, output: list[tuple[float, str]]) -> list[Frame]:
    """Screens after the messages, and in between as often as SECONDS_BETWEEN_FRAMES says."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    stream.feed(f"$ {command}\r\n")
    result = [(0.0, _rows(screen))]
    for seconds, text in output:
        stream.feed(text)
        last_seconds, last_rows = result[-1]
        rows = _rows(screen)
        is_message = rows[:-1] != last_rows[:-1] and "\n" in text
        if is_message or seconds - last_seconds >= SECONDS_BETWEEN_FRAMES:
            result.append((seconds, rows))
    result.append((output[-1][0], _rows(screen)))
    return result


def _rows(screen: pyte.Screen) -> list[Row]:
    return [_runs(screen.buffer[row]) for row in range(ROWS)]


def _runs(line: dict[int, pyte.screens.Char]) -> Row:
    """The line's characters, together where they have one color."""
    runs = []
    column = 0
    for color, group in groupby((line[i] for i in range(COLUMNS)), key=lambda char: char.fg):
        text = "".join(char.data for char in group)
        if text.strip():
            runs.append((column, text.rstrip(), color))
        column += len(text)
    return tuple(runs)


def picture(frames: list[Frame], theme: dict[str, str]) -> str:
    """An SVG that shows each row of each frame at its time."""
    end = frames[-1][0] / SPEED + SECONDS_AT_THE_END
    width = 2 * LEFT + COLUMNS * WIDTH
    height = TOP + ROWS * HEIGHT + 8
    keyframes: dict[tuple[int, int], str] = {}
    body = []
    times = [seconds / SPEED for seconds, _ in frames]
    clocks = [
        ((0, f"{int(seconds) // 60}:{int(seconds) % 60:02}", "dim"),) for seconds, _ in frames
    ]
    for row in range(ROWS):
        shown = [rows[row] for _, rows in frames]
        body += _timeline(shown, times, end, theme, keyframes, LEFT, TOP + (row + 0.7) * HEIGHT)
    body += _timeline(clocks, times, end, theme, keyframes, width - LEFT - 4 * WIDTH, 20)
    rules = [f"@keyframes {name}{{{_percentages(*span)}}}" for span, name in keyframes.items()]
    classes = [
        f".{name}{{animation:{name} {end:.1f}s step-end infinite;opacity:{int(span[1] == 10000)}}}"
        for span, name in keyframes.items()
    ]
    still = "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-size="14" font-family='
            "\"ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace\">",
            f"<style>text{{white-space:pre}}{''.join(rules)}{''.join(classes)}{still}</style>",
            f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8" '
            f'fill="{theme["background"]}" stroke="{theme["border"]}"/>',
            *(f'<circle cx="{x}" cy="16" r="5" fill="{theme["border"]}"/>' for x in (20, 37, 54)),
            *body,
            "</svg>\n",
        ]
    )


def _percentages(start: int, end: int) -> str:
    """Keyframes that show something from one hundredth of a percent to another."""
    points = {0: 0, start: 1, end: 0}
    if end == 10000:
        points[end] = 1
    return "".join(f"{point / 100:g}%{{opacity:{value}}}" for point, value in points.items())


def _timeline(
    shown: list[Row],
    times: list[float],
    end: float,
    theme: dict[str, str],
    keyframes: dict[tuple[int, int], str],
    x: float,
    y: float,
) -> list[str]:
    """The contents of one place over time, each in a group that is visible at its time."""
    result = []
    for runs, group in groupby(range(len(shown)), key=lambda i: shown[i]):
        indices = list(group)
        if not runs:
            continue
        after = indices[-1] + 1
        start = round(times[indices[0]] / end * 10000)
        stop = round(times[after] / end * 10000) if after < len(times) else 10000
        if stop > start:
            name = keyframes.setdefault((start, stop), f"k{len(keyframes)}")
            drawn = "".join(_draw(run, theme, x, y) for run in runs)
            result.append(f'<g class="{name}">{drawn}</g>')
    return result


def _draw(run: Run, theme: dict[str, str], x: float, y: float) -> str:
    """A piece of text; the progress bar as a rectangle."""
    column, text, color = run
    left = x + column * WIDTH
    if set(text) <= set("━╸╺"):
        begin = 0.5 if text[0] == "╺" else 0.0
        size = len(text) - begin - (0.5 if text[-1] == "╸" else 0.0)
        return (
            f'<rect x="{left + begin * WIDTH:.1f}" y="{y - 6:.1f}" width="{size * WIDTH:.1f}" '
            f'height="3" fill="{theme[color]}"/>'
        )
    indent = len(text) - len(text.lstrip())
    text = text.lstrip()
    return (
        f'<text x="{left + indent * WIDTH:.1f}" y="{y:.1f}" textLength="{len(text) * WIDTH:.1f}" '
        f'fill="{theme[color]}">{escape(text, quote=False)}</text>'
    )


def main() -> None:
    arguments = sys.argv[1:]
    recorded = frames(f"python {' '.join(arguments)}", record(arguments))
    for name, theme in THEMES.items():
        path = Path(__file__).with_name(f"run-{name}.svg")
        path.write_text(picture(recorded, theme), encoding="utf-8")
        print(f"{path}: {path.stat().st_size:,} bytes, {len(recorded)} frames")


if __name__ == "__main__":
    main()

"""Numbers formatted for people."""

from __future__ import annotations


def count(number: float) -> str:
    """Three digits and a letter: 987, 12.3k, 4.56M, 176B."""
    for letter in ("", "k", "M", "B", "T"):
        if abs(number) < 999.5:
            break
        if letter != "T":
            number /= 1000
    if letter == "" and number == int(number):
        return str(int(number))
    return f"{number:.{2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0}f}{letter}"


def size(number: float) -> str:
    """Bytes in powers of 1024: 912 B, 1.50 KiB, 79.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1023.5 or unit == "TiB":
            break
        number /= 1024
    if unit == "B":
        return f"{number:.0f} B"
    return f"{number:.{2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0}f} {unit}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:00:07, 1:02:03; with days: 3d 04:05:06."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock.rjust(8, '0')}" if days else clock


def transfer(number: float, seconds: float) -> str:
    """Transferred bytes, in powers of 1000, and their rate: 2.40 GB in 3.1 s (0.77 GB/s)."""
    power = next((k for k in (4, 3, 2, 1) if number >= 1000**k), 0)
    unit, amount = ("B", "kB", "MB", "GB", "TB")[power], number / 1000**power
    return f"{amount:.{2 if power else 0}f} {unit} in {seconds:.1f} s ({number / max(seconds, 1e-9) / 1e9:.2f} GB/s)"


def teraflops_per_rank(flops: float, seconds: float, ranks: int) -> float:
    """TFLOP/s of one rank."""
    return flops / (seconds * ranks) / 1e12

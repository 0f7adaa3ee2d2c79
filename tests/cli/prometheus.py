"""Prometheus's text format, read strictly, and the advice that `promtool check metrics` gives. Standard library only."""
import re
import shutil
import subprocess

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(,|$)')
# Base units are wanted, in full.
BAD_UNITS = {"ms", "milliseconds", "us", "microseconds", "ns", "nanoseconds", "minutes", "hours", "days", "kb", "mb", "gb", "kilobytes",
             "megabytes", "kibibytes", "mebibytes", "bits", "percent", "s", "sec", "secs", "b"}
TYPES = {"counter", "gauge", "histogram", "summary"}


def labels_of(text):
    found, at = {}, 0
    while at < len(text):
        m = LABEL.match(text, at)
        if not m or m[1] in found or m[1].startswith("__"):
            raise ValueError("labels: " + text)
        found[m[1]] = m[2]
        at = m.end()
        if m[3] == "," and at == len(text):
            raise ValueError("a comma at the end: " + text)
    return found


def families(page):
    """{name: (type, help, [(sample's name, labels, value)])}; ValueError where the page isn't as it should be."""
    if not page.endswith("\n"):
        raise ValueError("no newline at the end")
    out, current, seen = {}, None, set()
    for line in page[:-1].split("\n"):
        m = re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.*)", line)
        if m and m[1] == "HELP":
            if m[2] in out or not m[3].strip() or re.search(r"\\(?![\\n])", m[3]):
                raise ValueError(line)
            current = m[2]
            out[current] = ["", m[3], []]
        elif m:
            if m[2] != current or out[current][0] or out[current][2] or m[3] not in TYPES:
                raise ValueError(line)
            out[current][0] = m[3]
        else:
            m = SAMPLE.fullmatch(line)
            if not m or not current or not out[current][0]:
                raise ValueError(line)
            endings = {"histogram": r"_(bucket|sum|count)$", "summary": r"_(sum|count)$"}.get(out[current][0])
            base = re.sub(endings, "", m[1]) if endings else m[1]
            labels = labels_of(m[2] or "")
            key = (m[1], tuple(sorted(labels.items())))
            if base != current or key in seen:
                raise ValueError(line)
            seen.add(key)
            out[current][2].append((m[1], labels, float(m[3])))
    return out


def faults(page):
    """What is wrong with a page, a text each."""
    try:
        found = families(page)
    except ValueError as e:
        return ["can't be read: %s" % e]
    bad = []
    for name, (kind, text, samples) in found.items():
        words = name.split("_")
        if not NAME.fullmatch(name):
            bad.append(name + ": not in lower case with underscores")
        if (kind == "counter") != name.endswith("_total"):
            bad.append(name + ": counters, and only they, end in _total")
        if words[-1] in ("count", "sum", "bucket", "info") and not (words[-1] == "info" and kind == "gauge"):
            bad.append(name + ": an ending that has another meaning")
        if set(words) & (TYPES | {"untyped"}):
            bad.append(name + ": its type in its name")
        if set(words) & BAD_UNITS:
            bad.append(name + ": not a base unit")
        if not text.endswith("."):
            bad.append(name + ": no sentence for its help")
        for sample, labels, value in samples:
            for label in labels:
                if not NAME.fullmatch(label) or (label == "le" and kind != "histogram") or label in ("quantile", "job", "instance"):
                    bad.append("%s: label %s" % (sample, label))
            if kind != "gauge" and not value >= 0:
                bad.append("%s: %g" % (sample, value))
        if kind == "summary" and any(s == name for s, _, _ in samples):
            bad.append(name + ": neither a sum nor a count")
        if kind == "histogram":
            bad += histogram_faults(name, samples)
    return bad


def histogram_faults(name, samples):
    try:
        buckets = [(float(l["le"]), v) for s, l, v in samples if s == name + "_bucket"]
    except (KeyError, ValueError):
        return [name + ": a bucket without a bound"]
    totals = [v for s, _, v in samples if s == name + "_count"]
    sums = [v for s, _, v in samples if s == name + "_sum"]
    if not buckets or buckets[-1][0] != float("inf") or len(totals) != 1 or len(sums) != 1:
        return [name + ": not a whole histogram"]
    bounds, counts = [b for b, _ in buckets], [n for _, n in buckets]
    if bounds != sorted(set(bounds)) or counts != sorted(counts):
        return [name + ": buckets that don't rise"]
    return [] if buckets[-1][1] == totals[0] else [name + ": counts that differ"]


def promtool(page):
    """What promtool says, which should be nothing; nothing, too, where it isn't installed."""
    tool = shutil.which("promtool")
    if not tool:
        return ""
    run = subprocess.run([tool, "check", "metrics"], input=page.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return run.stdout.decode() + ("" if run.returncode == 0 else "exit code %d" % run.returncode)


# A reader that takes everything finds no fault.
GOOD = '# HELP a_total A.\n# TYPE a_total counter\na_total{b="c"} 1\na_total{b="d"} 2\n'
HIST = '# HELP h_seconds H.\n# TYPE h_seconds histogram\nh_seconds_bucket{le="1"} %d\nh_seconds_bucket{le="+Inf"} %d\n' \
       'h_seconds_sum 1\nh_seconds_count %d\n'
assert faults(GOOD) == faults(HIST % (1, 2, 2)) == []
for page in (GOOD[:-1], GOOD + GOOD, GOOD.replace("d", "c"), GOOD.replace("counter", "gauge"), GOOD.replace("_total", ""), GOOD.replace(" 1", ""),
             GOOD.replace("A.", ""), GOOD.replace('"c"', '"\\c"'), GOOD.replace('"c"', "c"), GOOD.replace('"c"', '"c",'), GOOD.replace(" 2", " -2"),
             GOOD.replace("a_", "a_ms_"), GOOD.replace("a_", "aB_"), GOOD.replace("b=", "le="), GOOD.replace("# TYPE a_total counter\n", ""),
             HIST % (3, 2, 2), HIST % (1, 2, 3), HIST.replace("+Inf", "2") % (1, 2, 2), HIST.replace("le=\"1\"", "le=\"x\"") % (1, 2, 2)):
    assert faults(page), page

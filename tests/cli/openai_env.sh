#!/usr/bin/env bash
# Prints a Python that has OpenAI's package: $IMPRESS_OPENAI_PYTHON, else one in a virtual environment that is made once, in
# ${XDG_CACHE_HOME:-~/.cache}/impress. Fails, and says why, where it can't be had.
# Call it before lib.sh, which moves the home directory.
set -euo pipefail
version=${IMPRESS_OPENAI_VERSION:-3.57.0}

if [ -n "${IMPRESS_OPENAI_PYTHON:-}" ]; then
    echo "$IMPRESS_OPENAI_PYTHON"
    exit 0
fi
dir=${XDG_CACHE_HOME:-$HOME/.cache}/impress/openai-$version
mkdir -p "${dir%/*}"
exec 9>"$dir.lock"
flock 9
if [ ! -x "$dir/bin/python" ] || ! "$dir/bin/python" -c 'import openai' 2>/dev/null; then
    rm -rf "$dir"
    {
        python3 -m venv "$dir" && "$dir/bin/python" -m pip install -q --disable-pip-version-check "openai==$version"
    } >&2 || {
        rm -rf "$dir"
        echo "openai_env.sh: PyPI's openai $version could not be installed" >&2
        exit 1
    }
fi
echo "$dir/bin/python"

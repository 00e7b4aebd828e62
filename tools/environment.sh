#!/bin/sh
# Brings .venv up to date for `make`. Usage: PYTHON=python3 EXTRAS=test sh tools/environment.sh
#
# .venv is ready when its stamp is newer than what it was made from and holds the wanted extras, and its Python starts
# and finds this checkout (it does not after an interrupted install, a moved checkout or a removed base Python).
set -u
python=.venv/bin/python
stamp=.venv/.installed

works() {
  "$python" -I -c 'import importlib.util, os
found = importlib.util.find_spec("kda_lab").origin
assert os.path.samefile(os.path.dirname(found), "kda_lab")' 2>/dev/null
}

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

command -v flock >/dev/null && exec 9<. && flock 9 # two at once: the second waits, and finds it made

[ "$(cat "$stamp" 2>/dev/null)" = "$EXTRAS" ] && [ "$stamp" -nt pyproject.toml ] && [ "$stamp" -nt constraints.txt ] &&
  works && exit 0

if [ -f "$stamp" ] && works; then
  echo "Bringing .venv up to date"
else
  command -v "$PYTHON" >/dev/null || fail "There is no '$PYTHON'. Fix: install Python 3.10 or newer, or name yours: make PYTHON=python3.12"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "kda_lab needs Python 3.10 or newer; '$PYTHON' is $("$PYTHON" --version 2>&1)." \
      "Fix: install a newer one and name it, for example: make PYTHON=python3.12"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$PYTHON' cannot make virtual environments. Fix (Debian, Ubuntu): sudo apt install python3-venv"
  echo "Making .venv (once; a few minutes, most of them for torch)"
  rm -rf .venv
  "$PYTHON" -m venv .venv || fail "Could not make .venv: see the message above."
fi

rm -f "$stamp" # an install that is interrupted from here on starts over
"$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$EXTRAS]" ||
  fail "Installing into .venv failed: see pip's message above, then run the same command again."
printf '%s\n' "$EXTRAS" >"$stamp"

#!/usr/bin/env bash
# Resolves the requirements of every target of the Makefile afresh, as from an ordinary package index: pip's settings and
# folders of wheels on this machine are left out, because they can hide a contradiction. One line a set; fails with the
# resolver's words. pip reads metadata alone, or whole wheels where an index serves neither metadata nor parts of a file.
set -uo pipefail
cd "$(dirname "$0")"
export PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="" PIP_EXTRA_INDEX_URL="" PIP_CONSTRAINT="" PIP_DISABLE_PIP_VERSION_CHECK=1
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv" && "$venv/bin/python" -m pip install -q -r resolve.txt || exit 1
failed=0

say() { # set, words of the resolver, exit code
  if [ "$3" = 0 ]; then
    echo "$1: resolves"
  else
    echo "$1: DOES NOT RESOLVE"; sed -n '/ERROR/,$ s/^/    /p' <<<"$2"; failed=1
  fi
}

resolve() { # set, options of pip
  local name=$1 words; shift
  words=$("$venv/bin/pip" install --dry-run --ignore-installed --use-feature=fast-deps "$@" -r "$name.txt" 2>&1)
  say "$name" "$words" $?
}

# A source distribution tells its requirements once torch is installed, and is unpacked without them: it has to be there.
there() { # set, package
  local pin words
  pin=$(sed -n "s/^$2==//p" "$1.txt")
  words=$("$venv/bin/pip" index versions --pre "$2" 2>&1)
  grep -qE "(: |, )${pin//./\\.}(,|$)" <<<"$words"
  say "$1, $2" "ERROR: $2==$pin is not there: ${words:0:300}" $?
}

for name in demo bench test fuzz docs history peers release; do resolve $name; done
for name in kernels vllm_lists vllm_step engine_vllm vllm_032 vllm_033 sglang; do resolve $name --no-deps; done
for package in flash-attn flash-attn-4; do there sources $package; done
exit $failed

#!/usr/bin/env bash
# Build a release into dist/ (wheel and sdist) and test it. Uploads nothing.
#   bash launch/release.sh                 the commit of HEAD, which needs the tag vX.Y.Z of megarl.__version__
#   --untagged                             the same without a tag, to try the script
#   --packages VENV                        test the wheel on the packages of VENV, instead of installing megarl[cpu]
#   --no-quickstart                        test the commands of the wheel without the quickstart (minutes)
#   MEGARL_PYTHON   interpreter with setuptools and wheel (default: python3.11, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tagged=1 packages="" quickstart=1
while [ $# -gt 0 ]; do
  case $1 in
    --untagged) tagged="" ;;
    --no-quickstart) quickstart="" ;;
    --packages) packages=$(realpath "${2:?--packages needs the folder of a virtual environment}"); shift ;;
    *) echo "release.sh: unknown argument $1; the head of the script lists all" >&2; exit 2 ;;
  esac
  shift
done
refuse() { echo "release.sh: $1" >&2; exit 2; }
python=${MEGARL_PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c "import setuptools, wheel" 2> /dev/null || refuse "$python has no setuptools or no wheel: install both, or set MEGARL_PYTHON"
[ -z "$(git status --porcelain --untracked-files=no)" ] || refuse "tracked files have changes: commit them first"

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megarl/__init__.py)
if [ -n "$tagged" ]; then
  git tag --points-at HEAD | grep -qxF "v$version" ||
    refuse "HEAD has no tag v$version. Set __version__ in megarl/__init__.py, commit, and run: git tag -a v$version"
  grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
    refuse "CHANGELOG.md has no section '## [$version] - YYYY-MM-DD': move the lines under Unreleased there"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH   # the same commit gives the same wheel
mkdir -p "$work/source" "$work/new" dist
git archive HEAD | tar -x -C "$work/source"   # no ignored or untracked files
build() { # build KIND FOLDER_OF_THE_SOURCE
  (cd "$2" && "$python" -c "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])" "$1" "$work/new") > "$work/build.log" 2>&1 ||
    { cat "$work/build.log" >&2; exit 1; }
}
build sdist "$work/source"
tar -xzf "$work/new/megarl-$version.tar.gz" -C "$work"
build wheel "$work/megarl-$version"   # from the sdist, which therefore is complete
wheel=$work/new/megarl-$version-py3-none-any.whl
if "$python" -m twine --version > /dev/null 2>&1; then
  "$python" -m twine check --strict "$work"/new/*
else
  echo "twine is not installed: the metadata was not checked (pip install twine)"
fi

"$python" -m venv "$work/venv"
fresh=$work/venv/bin/python
if [ -n "$packages" ]; then
  site=$("$packages/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$site" > "$("$fresh" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
  "$fresh" -m pip install --quiet --no-deps --no-index "$wheel"
else
  "$fresh" -m pip install --quiet "$wheel[cpu]"
  builds=$("$fresh" -c "from megarl.platform.version_sets import cuda_builds; print(*cuda_builds())")
  if [ -n "$builds" ]; then
    echo "pip took CUDA builds of $builds, which a torch for CPUs cannot load: they are removed, as the README says"
    # shellcheck disable=SC2086  # several names
    "$fresh" -m pip uninstall --quiet -y $builds
  fi
fi
mkdir "$work/user" && cd "$work/user"   # a user's folder, without a checkout
"$work/venv/bin/megarl" --version > version.txt
head -1 version.txt | grep -qxF "megarl $version" || { cat version.txt >&2; exit 1; }
"$work/venv/bin/megarl" keys temperature > keys.txt
"$work/venv/bin/megarl" init first.yaml --task dapo --devices "2 cpu" --defaults > init.txt
if [ -n "$quickstart" ]; then "$work/venv/bin/megarl" quickstart; fi
cd - > /dev/null

rm -f dist/megarl-"$version"*
cp "$work"/new/* dist/
(cd dist && sha256sum megarl-"$version"*)
echo "built and tested; nothing was uploaded. To upload: python -m twine upload dist/megarl-$version*"

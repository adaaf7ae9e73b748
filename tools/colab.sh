#!/bin/sh
# Run every lesson, or those that are named, with Colab's versions of torch, ipywidgets and IPython, and compare
# the outputs with the committed ones. The environment is build/colab. PYTHON chooses its Python (Colab has 3.12).
set -eu

cd "$(dirname "$0")/.."
py=build/colab/bin/python
if ! cmp -s tools/colab.txt build/colab/installed.txt; then
    "${PYTHON:-python3}" -m venv build/colab
    index=$(sed -n 's/^--extra-index-url[ =]*//p' binder/requirements.txt)
    "$py" -m pip install --quiet --extra-index-url "$index" -r tools/colab.txt
    "$py" -m pip install --quiet --no-deps -e .
    cp tools/colab.txt build/colab/installed.txt
fi
[ $# != 0 ] || set -- notebooks
exec "$py" -m pytest --nbval "$@" --nbval-sanitize-with tests/nbval_sanitize.cfg \
    -p no:cacheprovider -n 2 --dist loadscope

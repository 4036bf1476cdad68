# To be sourced at the top of the tree, on a machine where this package is not installed: makes it importable as `limpet`
# for as long as the shell lives. Wheels of what that machine lacks lie in .whl/.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -d .whl ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl || exit 1
fi
ln -s "$PWD" "$site/limpet"
mkdir "$site/limpet-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: limpet\nVersion: 0.1.0\n' >"$site/limpet-0.1.0.dist-info/METADATA"
export PYTHONPATH="$site" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

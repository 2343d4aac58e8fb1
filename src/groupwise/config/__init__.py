"""How a run is described: every setting with its meaning, and the way from YAML and overrides to
a `Recipe`.

In: a recipe file, overrides.  Out: `settings.Recipe`, frozen and checked, or one ConfigError that
lists every problem with its line.

- `settings`: every setting with its meaning, default and range.
- `objectives`: the names that `objective` may have.
- `cluster`: the machines that `groupwise launch` asks for.
- `recipes`: recipes in and out.
- `strict_yaml`: YAML with the place of each value.
- `overlays`: stages and overrides, laid over keys.
- `schema`: every key with its type, default and TRL's name.
- `validation`: rules between values.
- `findings`: all that is wrong with a recipe, reported at once.
- `resolve`: from a recipe to an algorithm.
- `bundled`: the recipes that come with Groupwise.
- `packaged_models`: short names of models that come in a package.
- `live_objects`: objects of the program where a recipe has names.
- `texts`: texts within settings.
- `trl_names`: TRL's names of arguments, for suggestions.

Nothing here imports torch.
"""

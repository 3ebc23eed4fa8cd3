"""Qualms' offline half: turn a frozen image classifier and its data into one calibrated ONNX file.

- `cli`, `recipe`, `run`: the commands, the TOML file that defines a run, and the run itself
- `stages`: the steps of a run, from the base classifier to its evaluation
- `data`: data sets by name, splits, noise and preprocessing
- `models`: base classifiers, their weights and how they are frozen
- `meta`: the Dirichlet meta-model, OOD scores, and the exported graph
- `fitting`: training loops, schedules and the feature cache
- `reporting`: evaluation, tables, plots, comparison and recalibration of bundles
- `paper`: the paper's tables, with every method they compare
- `bench`: speed and accuracy benchmarks of training
- `recipes`: the recipes that come with the package
"""

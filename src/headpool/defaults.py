"""Defaults of method aligned, which the command line, recipes and Python have in common (docs/method.md has the figures
behind them).
"""

CALIBRATION_TOKENS = 524_288

HEAL_STEPS = 1000

HEAL_RATE = 0.8
"""Relative to the size of what is trained."""

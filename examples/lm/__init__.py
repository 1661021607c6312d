"""The parts of `train_lm.py`."""

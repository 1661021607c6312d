"""What `train_lm.py` is made of, apart from the training itself."""

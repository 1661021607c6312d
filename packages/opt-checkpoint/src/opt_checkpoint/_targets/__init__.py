"""Anyone's optimizer: what each kind of target has to save, and how it is given back."""

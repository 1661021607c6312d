"""Anyone's optimizer: what each kind of target saves, and how it is given back."""

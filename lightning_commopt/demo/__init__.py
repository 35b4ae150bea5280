"""What ``commopt demo`` shows: a small model to train, and a slow network to train it on."""

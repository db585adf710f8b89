"""Reference data, and comparisons of this package's environments and learners with them."""

"""Step times on slow links: every mode side by side, on ranks joined by a shaped network of their own."""

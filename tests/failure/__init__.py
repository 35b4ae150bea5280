"""What happens when a rank fails."""

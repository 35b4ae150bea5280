"""The laws of DESIGN section 6 on the gradient path alone: plain torch in worker processes, without Lightning."""

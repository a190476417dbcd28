"""What becomes of whole documents: which are trained on, and where long ones are cut."""

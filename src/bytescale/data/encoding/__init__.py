"""From documents to token ids and masks: text, ids made elsewhere, and conversations."""

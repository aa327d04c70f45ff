"""Stability of training at 100M parameters: QK-clip against other remedies, and alarms before planted instabilities."""

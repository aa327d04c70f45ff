"""Attention operations, one folder each: public function, validation, reference, backends and kernels."""

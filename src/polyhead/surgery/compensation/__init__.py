"""What is written by the heads that stay, solved for what the whole layer wrote."""

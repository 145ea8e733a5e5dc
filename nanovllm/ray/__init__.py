"""nanovllm on a Ray cluster; needs `pip install nanovllm[ray]`, which nothing else imports."""

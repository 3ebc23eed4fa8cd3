"""Access to the service: API keys, certificates, proxies."""

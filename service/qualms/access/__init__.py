"""Who may use the service: API keys, certificates, proxies."""

"""The interfaces of Pulsar Functions. Magnetar does not run functions. This package exists so that
programs which import it can start."""

"""The interfaces of Pulsar Functions. Magnetar does not run functions: the module exists so that
programs which import it load."""

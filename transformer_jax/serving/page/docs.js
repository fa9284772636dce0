// The API reference: Swagger UI with the schema of this server.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true });
